"""Models from hubs: the hubs' own libraries against a small hub on this machine, or where there is none, a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError, ModelUnavailable
from pdserve.launch.model import check_model, parse_model, resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

REVISION = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 300_000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"the same weights again",
    "README.md": b"words",
}


class _Hub(BaseHTTPRequestHandler):
    """As much of Hugging Face's HTTP API as a download of one public model takes."""

    server_version = "hub"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        match path.removeprefix("/").split("/"):
            case ["api", "models", "org", "small", "revision", _]:
                self._json({"id": "org/small", "sha": REVISION, "siblings": [{"rfilename": name} for name in FILES]})
            case ["api", "models", "org", "small", "tree", _]:
                self._json(
                    [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
                )
            case ["org", "small", "resolve", _, name] if name in FILES:
                self._send(FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": REVISION})
            case ["api", "models", "org", "gated", *_]:
                self._send(b"", {"X-Error-Code": "GatedRepo"}, status=HTTPStatus.FORBIDDEN)
            case ["api", "models", "org", "broken", *_]:
                self._send(b"", {}, status=HTTPStatus.INTERNAL_SERVER_ERROR)
            case _:
                self._send(b"", {"X-Error-Code": "RepoNotFound"}, status=HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: Mapping[str, str], *, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Tests are quiet."""


@pytest.fixture
def hub_url() -> Iterator[str]:
    """A hub on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


PROGRAM = """
import json, sys
from pathlib import Path
from pdserve.errors import PdserveError
from pdserve.launch.model import check_model, resolve_model
calls = []
try:
    source = check_model(sys.argv[1], cache_dir=Path("/nonexistent"))
    model = resolve_model(source, on_progress=lambda *call: calls.append(call))
    print(json.dumps({"path": str(model.path), "name": model.served_name, "last": calls[-1]}))
except PdserveError as exc:
    print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}))
"""


def _fetch(spec: str, *, endpoint: str, cache: Path, **env: str) -> dict[str, Any]:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    pytest.importorskip("huggingface_hub")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, spec],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), **env},
        capture_output=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_a_model_is_fetched_from_hugging_face_without_the_files_that_nobody_reads(hub_url: str, tmp_path: Path) -> None:
    """Weights, configuration and tokenizer come; a second copy of the weights and the README do not."""
    answer = _fetch("hf:org/small", endpoint=hub_url, cache=tmp_path)
    assert answer["name"] == "small"
    folder = tmp_path / "hub" / "models--org--small" / "snapshots" / REVISION
    assert answer["path"] == str(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_download_tells_how_many_bytes_of_how_many_there_are(hub_url: str, tmp_path: Path) -> None:
    """The last report of a download that is whole says so."""
    answer = _fetch("hf:org/small", endpoint=hub_url, cache=tmp_path)
    num_bytes = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert answer["last"] == ["Fetching hf:org/small", num_bytes, num_bytes]


def test_a_model_that_was_fetched_once_needs_no_hub(hub_url: str, tmp_path: Path) -> None:
    """What lies in Hugging Face's cache is served when the hub cannot be reached any more."""
    first = _fetch("hf:org/small", endpoint=hub_url, cache=tmp_path)
    again = _fetch("hf:org/small", endpoint="http://127.0.0.1:9", cache=tmp_path)
    assert again["path"] == first["path"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hf:org/unknown", "Hugging Face has no model of that name, or it is private"),
        ("hf:org/gated", "accept them on its page, then set HF_TOKEN"),
        ("hf:org/broken", "Hugging Face cannot be reached"),
    ],
)
def test_hugging_face_refusals_are_told_in_words(hub_url: str, tmp_path: Path, spec: str, words: str) -> None:
    """An unknown name, terms to accept and a hub in trouble are told apart."""
    error = _fetch(spec, endpoint=hub_url, cache=tmp_path)["error"]
    assert error.startswith(f"ModelUnavailable: model {spec}: ")
    assert words in error


def test_an_unreachable_hugging_face_names_the_mirror_variable_and_the_way_around(tmp_path: Path) -> None:
    """No connection: HF_ENDPOINT, or a folder that was filled elsewhere."""
    error = _fetch("hf:org/small", endpoint="http://127.0.0.1:9", cache=tmp_path)["error"]
    assert "cannot be reached" in error
    assert "HF_ENDPOINT" in error
    assert "give the folder as the model" in error


def test_a_broken_proxy_is_an_unreachable_hub(tmp_path: Path) -> None:
    """The HTTP library's own errors are mapped too: they are no OSError."""
    answer = _fetch("hf:org/small", endpoint="https://hub.invalid", cache=tmp_path, HTTPS_PROXY="http://127.0.0.1:9")
    assert answer["error"].startswith("ModelUnavailable: model hf:org/small: ")


def test_offline_mode_is_named_when_it_is_the_reason(hub_url: str, tmp_path: Path) -> None:
    """HF_HUB_OFFLINE=1 and nothing in the cache."""
    assert "HF_HUB_OFFLINE" in _fetch("hf:org/small", endpoint=hub_url, cache=tmp_path, HF_HUB_OFFLINE="1")["error"]


# ModelScope's library is not among what the tests install, so a stand-in shows what pdserve asks of it.


class _HubError(Exception):
    pass


class _NotExistError(_HubError):
    pass


class _NetworkError(_HubError, ConnectionError):
    pass


@pytest.fixture
def model_scope(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., str]], None]:
    """Puts modules with ModelScope's names in place; what they download is given by the test."""

    def install(snapshot_download: Callable[..., str]) -> None:
        for name in ("modelscope", "modelscope.hub", "modelscope.hub.errors", "modelscope_hub"):
            module = ModuleType(name)
            module.__spec__ = _module_spec(name)
            vars(module).update(snapshot_download=snapshot_download, HubError=_HubError)
            vars(module).update(NetworkError=_NetworkError, NotExistError=_NotExistError)
            monkeypatch.setitem(sys.modules, name, module)

    return install


def _module_spec(name: str) -> Any:
    """A spec, without which find_spec refuses a module that is already there."""
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


def test_a_model_is_fetched_from_model_scope(model_scope: Callable[[Callable[..., str]], None], tmp_path: Path) -> None:
    """The folder and the sum of all files' bytes come from its library's download."""
    calls = []

    def download(name: str, *, allow_patterns: list[str], progress_callbacks: list[Any]) -> str:
        assert name == "Qwen/Qwen2.5-0.5B-Instruct"
        assert "*.safetensors" in allow_patterns
        for file_name in ("config.json", "model.safetensors"):
            (tmp_path / file_name).write_bytes(b"12345")
            counter = progress_callbacks[0](file_name, 5)
            counter.update(5)
            counter.end()
        return str(tmp_path)

    model_scope(download)
    source = check_model("modelscope:Qwen/Qwen2.5-0.5B-Instruct", cache_dir=tmp_path)
    model = resolve_model(source, on_progress=lambda *call: calls.append(call))
    assert (model.path, model.served_name) == (tmp_path, "Qwen2.5-0.5B-Instruct")
    assert calls[-1] == ("Fetching modelscope:Qwen/Qwen2.5-0.5B-Instruct", 10, 10)


def _wrapped(cause: Exception) -> OSError:
    """As `raise requests.HTTPError(...) from cause` does."""
    error = OSError(str(cause))
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_NotExistError("no such repo"), "has no model of that name"),
        (_wrapped(_NotExistError("no such repo")), "has no model of that name"),
        (_NetworkError("name resolution\nand more"), "cannot be reached (name resolution)"),
        (_HubError("odd"), "the download failed (odd)"),
    ],
)
def test_model_scope_refusals_are_told_in_words(
    model_scope: Callable[[Callable[..., str]], None], tmp_path: Path, error: Exception, words: str
) -> None:
    """Whichever way its library tells, the sentence says what happened."""

    def download(*_args: object, **_kwargs: object) -> str:
        raise error

    model_scope(download)
    with pytest.raises(ModelUnavailable) as info:
        parse_model("modelscope:org/name", cache_dir=tmp_path).fetch(lambda *_call: None)
    assert words in str(info.value)


def test_a_download_without_weights_is_no_model(
    model_scope: Callable[[Callable[..., str]], None], tmp_path: Path
) -> None:
    """Such as a name that holds GGUF files alone."""
    (tmp_path / "config.json").write_text("{}")
    model_scope(lambda *_args, **_kwargs: str(tmp_path))
    with pytest.raises(ModelUnavailable, match="has no weights"):
        parse_model("modelscope:org/name", cache_dir=tmp_path).fetch(lambda *_call: None)


def test_a_hub_whose_library_is_missing_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sentence says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install huggingface_hub"):
        check_model("hf:org/name", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r'pip install "pdserve\[modelscope\]"'):
        check_model("modelscope:org/name", cache_dir=tmp_path)

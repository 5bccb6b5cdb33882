"""Who is measured: how each gateway is installed, started in front of two engines, and which legs it must have sent.

Peers go into a cache folder of their own and leave the system and `.venv` as they are. Knows nothing of loads and figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PINS = {
    "vllm-router": "0.1.17",
    "sglang-router": "0.3.2",
    "fastapi": "0.136.3",
    "httpx": "0.28.1",
    "uvicorn": "0.54.0",
    "uvloop": "0.23.0",
    "httptools": "0.9.0",
}
"""uvicorn takes uvloop and httptools when they are there, which makes the toy twice as fast as it would be without."""
_NGINX_PLACES = ("/usr/sbin", "/usr/local/sbin")
_TOY = Path(__file__).with_name("gateway_toy.py")


class Legs(StrEnum):
    """What the engines must have been asked for each answer."""

    SPLIT = "split"
    """P, then D with P's handoff."""
    AT_ONCE = "at once"
    """P and D at the same time, as SGLang's engines are asked: no handoff."""
    ALONE = "alone"
    """D, and nobody else."""


class Name(StrEnum):
    """Who is in the tables; the value is a column's heading."""

    OURS = "pdserve"
    VLLM_ROUTER = "vllm-router"
    SGLANG_ROUTER = "sglang-router"
    NGINX = "nginx"
    TOY = "FastAPI + httpx"
    DIRECT = "no gateway"
    ONE_WORKER = "1 worker"
    TWO_WORKERS = "2 workers"


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ones, for a gateway and for its metrics or admin listener."""

    clients: int
    admin: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One gateway."""

    name: Name
    legs: Legs
    version: str = ""
    """With its name."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What is there to be measured."""

    peers: tuple[Peer, ...]
    missing: dict[Name, str]
    """Why somebody is left out, and what to do about it."""
    folder: Path
    nginx: str = ""

    def command(self, name: Name, ports: Ports, engines: dict[str, str], folder: Path) -> list[str]:
        """How to start a gateway, which may write into `folder`."""
        prefill, decode = engines["prefill"], engines["decode"]
        port, admin = str(ports.clients), str(ports.admin)
        python = str(self.folder / "bin" / "python")
        router = ["--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--port", port]
        router += ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1", "--prometheus-port", admin]
        match name:
            case Name.VLLM_ROUTER:
                kind = ["--vllm-pd-disaggregation", "--log-level", "warning"]
                return [python, "-m", "vllm_router.launch_router", *kind, *router]
            case Name.SGLANG_ROUTER:
                kind = ["--pd-disaggregation", "--log-level", "warn"]
                return [python, "-m", "sglang_router.launch_router", *kind, *router]
            case Name.NGINX:
                config = folder / "nginx.conf"
                config.write_text(_nginx_config(ports.clients, decode, folder), encoding="utf-8")
                return [self.nginx, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
            case Name.TOY:
                return [python, str(_TOY), port, prefill, decode]
            case _:
                config = folder / "pdserve.toml"
                config.touch()  # Empty: nothing of the caller's own configuration is to be measured.
                ours = ["--config", str(config), "--prefill", prefill, "--decode", decode, "--port", port]
                workers = ["--workers", "2"] if name is Name.TWO_WORKERS else []
                return [sys.executable, "-m", "pdserve", "gateway", *ours, "--admin-port", admin, *workers]


def install(folder: Path, *, version: str) -> Installed:
    """Everybody that can be had. `version` is ours. Ends the program when pip fails."""
    _install_packages(folder)
    nginx = find_nginx(folder)
    missing = {}
    peers = [
        Peer(Name.DIRECT, Legs.ALONE),
        Peer(Name.OURS, Legs.SPLIT, f"pdserve {version}"),
        Peer(Name.VLLM_ROUTER, Legs.SPLIT, _pinned("vllm-router")),
        Peer(Name.SGLANG_ROUTER, Legs.AT_ONCE, _pinned("sglang-router")),
        Peer(Name.ONE_WORKER, Legs.SPLIT),
        Peer(Name.TWO_WORKERS, Legs.SPLIT),
        Peer(Name.TOY, Legs.SPLIT, ", ".join(map(_pinned, ("fastapi", "httpx", "uvicorn")))),
    ]
    if nginx:
        peers.append(Peer(Name.NGINX, Legs.ALONE, f"nginx {nginx_version(nginx)}"))
    else:
        missing[Name.NGINX] = "not found, and apt-get gave none; on Debian and Ubuntu: apt install nginx"
    return Installed(tuple(peers), missing, folder, nginx)


def _pinned(package: str) -> str:
    return f"{package} {PINS[package]}"


def _install_packages(folder: Path) -> None:
    wanted = [f"{name}=={version}" for name, version in PINS.items()]
    stamp = folder / "installed"
    mark = "\n".join([*wanted, sys.version])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == mark:
        return
    sys.stderr.write(f"Installing {', '.join(wanted)} into {folder}\n")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *wanted], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip could not install the peers:\n{done.stderr[-2000:]}")
    stamp.write_text(mark, encoding="utf-8")


def find_nginx(folder: Path) -> str:
    """The system's nginx, or Debian's taken out of its package without installing it; empty when there is none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_NGINX_PLACES])
    unpacked = folder / "nginx" / "usr" / "sbin" / "nginx"
    found = shutil.which("nginx", path=path)
    if found is None and not unpacked.exists():
        _unpack_nginx(folder / "nginx")
    nginx = found or str(unpacked)
    return nginx if nginx_version(nginx) else ""


def _unpack_nginx(folder: Path) -> None:
    """Installing it would also start it, on port 80."""
    if shutil.which("apt-get") is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "nginx"]
    if subprocess.run(download, cwd=folder, check=False, capture_output=True).returncode and os.geteuid() == 0:
        subprocess.run(["apt-get", "update"], check=False, capture_output=True)
        subprocess.run(download, cwd=folder, check=False, capture_output=True)
    for package in folder.glob("nginx_*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=False)


def nginx_version(nginx: str) -> str:
    """Empty when it does not run."""
    try:
        told = subprocess.run([nginx, "-v"], check=True, capture_output=True, text=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.strip().partition("/")[2].partition(" ")[0]


def _nginx_config(port: int, decode_url: str, folder: Path) -> str:
    """A plain proxy to D that keeps its connections, sends pieces on as they come and writes no body to the disk."""
    temporary = "\n".join(
        f"  {kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = f"user {os.environ.get('USER', 'root')};" if os.geteuid() == 0 else ""
    return f"""{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
{temporary}
  access_log off;
  keepalive_requests 1000000000;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  upstream decode {{
    server {decode_url.removeprefix("http://")};
    keepalive 2048;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://decode;
      proxy_http_version 1.1;
      proxy_set_header connection "";
      proxy_buffering off;
    }}
  }}
}}
"""

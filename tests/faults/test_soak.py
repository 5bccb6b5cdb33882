"""The soak in small: the whole run is `scripts/bench soak`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.asking import APIS, read_whole
from bench.soak import Requests
from bench.soak_engines import SETTINGS
from pdserve.sim.stand_in import run_stand_in

_TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(180)
def test_two_thousand_requests(tmp_path: Path) -> None:
    """No wrong text, nothing that hangs, nothing left; by another way than any run before."""
    seed = random.randrange(2**32)  # noqa: S311 - printed with a failure
    report = tmp_path / "report.json"
    options = ["--requests", "2000", "--restart-every", "600", "--lease", "10", "--seed", str(seed)]
    command = [sys.executable, "-m", "bench.soak", *options, "--json", str(report)]
    env = os.environ | {"PYTHONPATH": str(_TESTS)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, f"{' '.join(options)}\n{done.stdout}\n{done.stderr[-3000:]}"
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["num_requests"] == 2000
    assert found["num_faults"] > 0
    # Both decode engines may be away for the same half second. Refusals are fast then, and make up hundreds of requests.
    refused = found["outcomes"].get("503 no_engine", 0)
    assert found["outcomes"]["right"] + refused > 1800
    assert found["outcomes"]["right"] > 500


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_the_texts_that_it_expects_are_an_engines() -> None:
    """What it works out is what a stand-in answers, for every API, many choices and many prompts."""
    import httpx

    requests = Requests(7, disconnects=0.0)
    async with run_stand_in("none", SETTINGS) as plain, httpx.AsyncClient(base_url=plain.url) as client:
        seen = set()
        for _ in range(300):
            request = requests.make()
            body = json.loads(request.body) | {"stream": False}
            answer = await client.post(request.api, json=body)
            said = read_whole(request.api, answer.content)
            assert [said.texts[index] for index in range(len(request.texts))] == list(request.texts)
            seen.add((request.api, len(request.texts)))
        assert {api for api, _ in seen} == set(APIS)
        assert {count for _, count in seen} == {1, 2, 3}

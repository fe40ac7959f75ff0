"""A server of our own: command line, start, death, end; and which servers are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp, which the SGLang engine needs, is not installed")

from asyncrl.config import Config
from asyncrl.generator.engines.base import EngineDead, SamplingParams
from asyncrl.generator.engines.sglang import open_sglang
from asyncrl.generator.engines.sglang_flags import flags
from asyncrl.generator.engines.sglang_server import check

FAKE = Path(__file__).with_name("fake_sglang.py")
GOOD: dict[str, Any] = {
    "version": "0.5.23", "dp_size": 1, "pp_size": 1, "tp_size": 1, "stream_interval": 1,
    "speculative_algorithm": None, "disable_overlap_schedule": True, "max_req_input_len": 256,
}  # fmt: skip


def config(**sections: Any) -> Config:
    return Config.model_validate({"generator": {"count": 1}} | sections)


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """Installs a package `sglang` whose `launch_server` runs the given text."""

    def install(text: str) -> None:
        package = tmp_path / "site" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    return install


def opened(settings: Config, folder: Path, scenario: Any) -> Any:
    async def run() -> Any:
        loop = asyncio.get_running_loop()
        engine: Any = await asyncio.to_thread(open_sglang, settings, str(folder), loop, 0, 0)
        try:
            async with asyncio.timeout(60):
                return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def ended(pid: int) -> bool:
    """Waits for the end of a process that is not our child."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)  # It is not our child, so nobody tells us when it ends.
    return False


# ---- the command line ---------------------------------------------------------------------------


def test_the_command_line_states_what_the_engine_relies_on():
    settings = config(
        generator={"count": 1, "slots": 48, "max_model_len": 200},
        model={"dtype": "bfloat16"},
        sglang={"tensor_parallel": 2, "args": {"attention-backend": "fa3", "enable_fp32_lm_head": True}},
        run={"seed": 7},
    )
    line = flags(settings, "/models/m", 1234, "3.0", index=2)
    joined = " ".join(line)
    assert joined.startswith(
        "--log-level warning --attention-backend fa3 --enable-fp32-lm-head --model-path /models/m"
    )
    for part in (
        "--host 127.0.0.1 --port 1234", "--tp-size 2", "--max-running-requests 48", "--context-length 206",
        "--dtype bfloat16", "--skip-tokenizer-init", "--incremental-streaming-output", "--stream-interval 1",
        "--disable-overlap-schedule", "--weight-version 3.0", "--random-seed 9",
    ):  # fmt: skip
        assert f" {part}" in joined
    recompute = config(weights={"kv": "recompute"})
    assert "--disable-overlap-schedule" not in flags(recompute, "/models/m", 1, "0.0", 0)


@pytest.mark.parametrize("name", ["stream-interval", "model", "tensor_parallel_size", "--port"])
def test_arguments_that_other_settings_decide_are_refused(name):
    with pytest.raises(ValueError, match=name.lstrip("-").replace("_", "-")):
        flags(config(sglang={"args": {name: "x"}}), "/models/m", 1, "0.0", 0)


# ---- which servers are refused ------------------------------------------------------------------


def test_a_server_as_we_start_it_is_accepted():
    check(GOOD, config())
    check(GOOD | {"disable_overlap_schedule": False}, config(weights={"kv": "recompute"}))
    check(GOOD | {"version": "0.6.0.dev3"}, config())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": "0.5.20"}, "0.5.21"),
        ({"version": None}, "0.5.21"),
        ({"dp_size": 2}, "dp-size"),
        ({"pp_size": 2}, "pp-size"),
        ({"stream_interval": 8}, "two versions"),
        ({"speculative_algorithm": "EAGLE"}, "speculative"),
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule is missing"),
        ({"max_req_input_len": 255}, "raise --context-length to 262"),
    ],
)
def test_a_server_that_would_give_wrong_answers_is_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        check(GOOD | wrong, config())


# ---- start, death, end --------------------------------------------------------------------------


def test_a_server_that_ends_while_it_starts_is_reported_with_its_exit_status(sglang, tmp_path, capfd):
    sglang("import sys; print('no GPU here'); sys.exit(7)")
    with pytest.raises(EngineDead, match="ended with exit status 7 while it started; its output above"):
        opened(config(), tmp_path, None)
    assert "no GPU here" in capfd.readouterr().out


def test_a_python_without_sglang_is_reported(tmp_path, capfd):
    with pytest.raises(EngineDead, match="exit status 1"):
        opened(config(), tmp_path, None)
    assert "sglang" in capfd.readouterr().err


def test_a_server_that_does_not_get_ready_is_ended(sglang, tmp_path):
    # The server that sleeps is the fault: it lives, and never says that it is ready.
    sglang(f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with pytest.raises(EngineDead, match=r"not ready within 2 s \(sglang.start_timeout_s\)"):
        opened(config(sglang={"start_timeout_s": 2.0}), tmp_path, None)
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_server_dies_with_its_generator(sglang, tmp_path):
    # This one sleeps so that it outlives its generator unless it is told to end.
    sglang(f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    code = """
        import asyncio
        from asyncrl.config import Config
        from asyncrl.generator.engines.sglang_server import Server
        async def main():
            await Server.start(Config(), "/models/m", "0.0", 0)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    generator = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(code)])
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)  # Another process writes the file; there is no event to wait for.
    pid = int((tmp_path / "pid").read_text())
    generator.kill()
    generator.wait()
    assert ended(pid)


def test_our_own_server_serves_and_its_death_and_end_are_handled(sglang, tmp_path):
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).save_pretrained(tmp_path / "m")
    sglang(f"import runpy; runpy.run_path({str(FAKE)!r}, run_name='__main__')")
    pids = []

    async def use(engine: Any) -> None:
        pids.append(engine._server._process.pid)
        deltas = [d async for d in engine.generate("r", [1, 2], SamplingParams(20))]
        assert sum(len(d.token_ids) for d in deltas) == 20
        assert os.getpgid(pids[-1]) == pids[-1]
        stream = engine.generate("s", [1, 2], SamplingParams(240))
        await anext(stream)
        os.kill(pids[-1], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"killed by signal 9|closed before its end|Disconnected|Payload"):
            async for _ in stream:
                pass

    opened(config(sglang={"start_timeout_s": 60.0}), tmp_path / "m", use)
    assert ended(pids[0])

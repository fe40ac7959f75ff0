"""CURVE keys: the file, who needs it, and that whoever has not the right one gets nothing from a real server."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
import zmq

from asyncrl import cli, keys, launch, settings
from asyncrl.config import Hub
from asyncrl.envs.registry import PluginError, load
from asyncrl.keys import Keys
from asyncrl.messages import Message, Score, Scored
from asyncrl.settings import UsageError
from asyncrl.transport import AsyncSocket, free_port_pair

ELSEWHERE = "tcp://10.0.0.7:5555"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.ENVIRONMENT, "")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    keys.write(keys.make(), tmp_path / "a.key")
    return tmp_path / "a.key"


def secrets_of(path: Path) -> list[str]:
    """The values in a key file."""
    return [line.split("'")[1] for line in path.read_text().splitlines() if "'" in line]


# ---- the file --------------------------------------------------------------------------------------


def test_a_key_file_is_its_owners_alone_and_is_never_written_over(key_file: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    before = key_file.read_text()
    with pytest.raises(UsageError, match="exists; another key would shut out"):
        keys.write(keys.make(), key_file)
    assert key_file.read_text() == before
    assert list(key_file.parent.iterdir()) == [key_file]


def test_a_key_file_that_others_can_read_is_refused_with_the_way_out(key_file: Path) -> None:
    key_file.chmod(0o640)
    with pytest.raises(UsageError, match=f"chmod 600 {key_file}"):
        keys.read(key_file)


def test_what_is_no_whole_set_of_keys_is_refused_and_no_error_shows_what_is_in_it(key_file: Path) -> None:
    text, held = key_file.read_text(), secrets_of(key_file)
    mixed = text.replace(held[3], secrets_of(_another(key_file))[3])  # The client's secret of another run.
    short, unknown = text.replace(held[0], held[0][:-1]), text + "more = 'x'\n"
    for broken in ("", "server_public = 1", text[: len(text) // 2], text[:-2], mixed, short, unknown, "\x00 = [["):
        key_file.write_text(broken)
        with pytest.raises(UsageError, match="holds no whole set of keys") as refused:
            keys.read(key_file)
        assert not any(value in repr(refused.value) for value in held)
        assert refused.value.__cause__ is None


def _another(path: Path) -> Path:
    other = path.with_name("other.key")
    keys.write(keys.make(), other)
    return other


def test_neither_repr_nor_text_of_keys_shows_one(key_file: Path) -> None:
    held = keys.read(key_file)
    shown = f"{held!r} {held} {[held]}"
    assert not any(value in shown for value in secrets_of(key_file))


# ---- who needs one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.8.0.9:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://10.0.0.7:5", False),
        ("tcp://node-7:5", False),
        ("tcp://127.0.0.1.example:5", False),
    ],
)
def test_only_what_no_other_machine_can_reach_is_loopback(endpoint: str, loopback: bool) -> None:
    assert keys.is_loopback(endpoint) is loopback


def test_a_run_has_a_key_if_its_hub_leaves_the_machine_or_one_is_asked_for_or_given(
    tmp_path: Path, key_file: Path
) -> None:
    def made(name: str, **flags: str) -> Path:
        config = settings.read([], {"run.dir": str(tmp_path), "run.name": name, **flags})
        launch.create(config, launch.new_run_dir(config))
        return tmp_path / name / keys.NAME

    assert not made("plain").exists()
    assert keys.of_run(tmp_path / "plain", Hub()) is None
    on, host = made("on", **{"hub.curve": "on"}), made("host", **{"hub.host": "10.0.0.7"})
    assert len({on.read_text(), host.read_text()}) == 2
    journal = b"".join(path.read_bytes() for path in on.parent.glob("run.db*"))
    assert not any(value.encode() in journal for value in secrets_of(on))
    keys.use(key_file)
    assert made("given").read_text() == key_file.read_text()


def test_a_run_whose_key_is_gone_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"asyncrl key {tmp_path}/run.key"):
        keys.of_run(tmp_path, Hub(curve="on"))
    with pytest.raises(UsageError, match="is missing, and hub"):
        keys.of_run(tmp_path, Hub(host="node"))


REFUSED = {
    "generator": ["generator", "--hub", ELSEWHERE, "--name", "g"],
    "learner": ["learner", "--hub", ELSEWHERE],
    "scorer": ["scorer", "--model", "m", "--endpoint", ELSEWHERE],
    "env-worker": ["env-worker", "--env", "arithmetic", "--endpoint", ELSEWHERE],
    "a run with a scorer elsewhere": ["train", "--dry-run", "--reward.endpoint", ELSEWHERE],
    "a run with a worker elsewhere": ["train", "--dry-run", "--env", "worker", "--env.args.endpoint", ELSEWHERE],
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_speaks_to_another_machine_without_a_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(REFUSED[name]) == 2
    said = capsys.readouterr().err
    assert f"{ELSEWHERE} is not on" in said
    assert "--key FILE" in said


def test_a_key_for_an_address_on_loopback_is_refused(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["scorer", "--model", "m", "--endpoint", "tcp://127.0.0.1:7", "--key", str(key_file)]
    with pytest.raises(SystemExit):
        cli.main(line)
    assert "an address on loopback has no key" in capsys.readouterr().err


def test_the_command_makes_a_key_that_a_worker_elsewhere_is_asked_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["key", str(tmp_path / "k")]) == 0
    assert not any(value in capsys.readouterr().out for value in secrets_of(tmp_path / "k"))
    keys.use(tmp_path / "k")
    with pytest.raises(PluginError, match="no environment worker answered"):
        load("worker", {"endpoint": f"tcp://localhost.:{free_port_pair('127.0.0.1')}", "timeout_s": 0.2})


# ---- sockets ---------------------------------------------------------------------------------------


class Server:
    """A ROUTER with keys that answers every Score, as the scorer does."""

    def __init__(self, held: Keys) -> None:
        self.heard: list[bytes] = []
        self.socket = AsyncSocket(zmq.ROUTER, self._on_message, keys=held)
        self.endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
        self.socket.bind(self.endpoint)

    def _on_message(self, peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        self.heard.append(peer)
        assert isinstance(message, Score)
        self.socket.send(Scored(message.request, 0.5), to=peer)


def asks(endpoint: str, name: str, held: Keys | None, answers: list[str]) -> AsyncSocket:
    """A client that has asked."""
    client = AsyncSocket(zmq.DEALER, lambda *_: answers.append(name), name, keys=held)
    client.connect(endpoint)
    client.send(Score(0, []))
    return client


async def until(happened) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.01)  # Another thread's sockets: there is no event to wait for.


def without_client_pair(held: Keys) -> Keys:
    public, secret = zmq.curve_keypair()
    return Keys(held.server_public, public, secret)


def of_another_server(held: Keys) -> Keys:
    return Keys(keys.make().server_public, held.client_public, held.client_secret)


async def test_only_who_has_the_runs_key_is_answered_and_others_do_not_reach_the_process(key_file: Path) -> None:
    held = keys.read(key_file)
    server, answers = Server(held), []
    strangers = {
        "no key": None,
        "another run's": keys.make(),
        "the server's public key and a pair of its own": without_client_pair(held),
        "the client's pair and another server": of_another_server(held),
    }
    clients = [asks(server.endpoint, name, key, answers) for name, key in strangers.items()]
    clients.append(asks(server.endpoint, "friend", held, answers))
    await until(lambda: answers)
    await asyncio.sleep(0.5)  # What must not happen leaves no event: strangers have had their time and more.
    for client in [asks(server.endpoint, f"friend {i}", held, answers) for i in range(3)]:
        clients.append(client)
    await until(lambda: len(answers) == 4)
    assert all(name.startswith("friend") for name in answers)
    assert all(peer.startswith(b"friend") for peer in server.heard)
    assert server.socket.malformed == 0
    for socket in (*clients, server.socket):
        socket.close()


def _without_server_secret(path: Path) -> Keys:
    lines = [line for line in path.read_text().splitlines() if "server_secret =" not in line]
    path.write_text("\n".join(lines))
    return keys.read(path)


async def test_the_file_without_the_servers_secret_is_enough_for_a_client_and_not_for_a_server(
    key_file: Path,
) -> None:
    server, answers = Server(keys.read(key_file)), []
    half = _without_server_secret(key_file)
    client = asks(server.endpoint, "friend", half, answers)
    await until(lambda: answers)
    with pytest.raises(UsageError, match="has no server_secret"):
        Server(half)
    client.close()
    server.socket.close()


async def test_two_runs_in_one_process_keep_each_others_clients_out() -> None:
    first, second = keys.make(), keys.make()
    servers, answers = [Server(first), Server(second)], []
    crossed = Keys(first.server_public, second.client_public, second.client_secret)
    clients = [
        asks(servers[0].endpoint, "crossed", crossed, answers),
        asks(servers[0].endpoint, "first", first, answers),
        asks(servers[1].endpoint, "second", second, answers),
    ]
    await until(lambda: len(answers) == 2)
    assert sorted(answers) == ["first", "second"]
    for socket in (*clients, *(server.socket for server in servers)):
        socket.close()


async def test_what_is_sent_with_keys_cannot_be_read_on_the_wire(key_file: Path) -> None:
    held, seen, answers = keys.read(key_file), bytearray(), []
    server = Server(held)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while block := await source.read(1 << 16):
            seen.extend(block)
            sink.write(block)

    async def relay(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        far, forth = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(near, forth), pump(far, back))

    tap = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = tap.sockets[0].getsockname()[1]
    client = asks(f"tcp://127.0.0.1:{port}", "friend", held, answers)
    client.send(Score(1, [{"role": "user", "content": "a secret of the run"}]))
    await until(lambda: len(answers) == 2)
    assert len(seen) > 200
    assert b"secret of the run" not in seen
    assert b"friend" not in seen
    for socket in (client, server.socket):
        socket.close()
    tap.close()


def test_a_process_reads_its_key_file_and_passes_only_the_path_on(key_file: Path) -> None:
    keys.use(key_file)
    assert os.environ[keys.ENVIRONMENT] == str(key_file)
    assert keys.for_hub(ELSEWHERE) == keys.read(key_file) == keys.for_endpoint(ELSEWHERE)
    assert keys.for_endpoint("tcp://127.0.0.1:1") is None
    keys.use(None)
    assert keys.for_hub("tcp://127.0.0.1:1") is None

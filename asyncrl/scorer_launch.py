"""What is decided about a run's scorer before anything starts: can it serve the model, and at which address.

The address is part of the run's stored configuration, so that generators on any machine learn it from the hub, and
a scorer that is restarted has the same one. No model is loaded. Called by `asyncrl.launch` and `asyncrl.train`.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from asyncrl import records
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.process import hold_run
from asyncrl.settings import UsageError
from asyncrl.transport import free_port_pair


def check_reward_model(path: Path) -> None:
    """Refuses a folder that holds no sequence classifier with one output and a fast tokenizer.

    Raises:
        UsageError: what is missing.
    """
    how = "give the Hugging Face folder of a sequence classifier with one output"
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise UsageError(f"reward.model = {path}: it has no {name}; {how}")
    model = json.loads((path / "config.json").read_text())
    kinds = model.get("architectures") or ["none"]
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise UsageError(f"reward.model = {path}: its architecture is {', '.join(kinds)}; {how}")
    # transformers stores the number of outputs as the length of this table, and leaves it out if it is 2.
    outputs = len(model.get("id2label") or "ab")
    if outputs != 1:
        raise UsageError(f"reward.model = {path}: it has {outputs} outputs; {how}")


def address(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def with_endpoint(config: Config) -> Config:
    """Gives the scorer that the supervisor will start an address, unless it has one.

    Raises:
        UsageError: it cannot listen at `reward.endpoint`.
    """
    reward = config.reward
    if reward.model is None:
        return config
    if reward.endpoint is None:
        return _at(config, free_port_pair(config.hub.host))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address(reward.endpoint))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"reward.endpoint = {reward.endpoint}: the scorer cannot listen there ({error}); give another "
                "address of this machine or none. For a scorer that runs elsewhere leave out reward.model"
            ) from error
    return config


def with_endpoint_again(config: Config, run_dir: Path) -> Config:
    """The same for a run that goes on: if its address is taken by now, another one is chosen and stored.

    Raises:
        UsageError: the run has a hub, so it is not for us to change.
    """
    try:
        return with_endpoint(config)
    except UsageError:
        moved = _at(config, free_port_pair(config.hub.host))
    lock = hold_run(run_dir)
    journal = Journal.open(run_dir / "run.db")
    try:
        journal.write([records.run_key("config_json", moved.model_dump_json())])
    finally:
        journal.close()
        lock.close()
    print(
        f"the scorer moves from {config.reward.endpoint} to {moved.reward.endpoint}: the port is taken", flush=True
    )
    return moved


def _at(config: Config, port: int) -> Config:
    endpoint = f"tcp://{config.hub.host}:{port}"
    return config.model_copy(update={"reward": config.reward.model_copy(update={"endpoint": endpoint})})

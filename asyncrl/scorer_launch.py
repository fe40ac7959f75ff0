"""What is decided about a run's scorer before anything starts: can it serve the model, and at which address.

The address is part of the run's stored configuration, so that generators on any machine learn it from the hub, and
a scorer that is restarted has the same one. No model is loaded. Called by `asyncrl.launch` and `asyncrl.train`.
"""

from __future__ import annotations

import json
import os
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


def check_device(device: str) -> None:
    """Refuses a GPU that CUDA_VISIBLE_DEVICES hides. Whether there is one at all, only torch can tell.

    Raises:
        UsageError: the setting, and what fits.
    """
    visible, (kind, _, number) = os.environ.get("CUDA_VISIBLE_DEVICES"), device.partition(":")
    if kind == "cuda" and visible is not None:
        seen = len(visible.split(",")) if visible else 0
        if int(number or 0) >= seen:
            leaves = f"leaves cuda:0 to cuda:{seen - 1} to choose from" if seen else "hides all GPUs"
            raise UsageError(
                f"reward.model_device = {device}, but CUDA_VISIBLE_DEVICES = {visible!r} {leaves}; set "
                "--reward.model_device cpu, or another GPU"
            )


def address(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def with_endpoint(config: Config, hub_port: int) -> Config:
    """Gives the scorer that the supervisor will start an address, unless it has one.

    Args:
        hub_port: the hub's control port; it and the next one are the hub's, which does not listen yet.

    Raises:
        UsageError: it cannot listen at `reward.endpoint`.
    """
    reward = config.reward
    if reward.model is None:
        return config
    if reward.endpoint is None:
        return _placed(config, hub_port)
    host, port = address(reward.endpoint)
    try:
        if host == config.hub.host and port in (hub_port, hub_port + 1):
            raise OSError(f"the hub has {hub_port} and {hub_port + 1}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"reward.endpoint = {reward.endpoint}: the scorer cannot listen there ({error}); give another "
            "address of this machine or none. For a scorer that runs elsewhere leave out reward.model"
        ) from error
    return config


def with_endpoint_again(config: Config, run_dir: Path, hub_port: int) -> Config:
    """The same for a run that goes on: if its address is taken by now, another one is chosen and stored.

    Raises:
        UsageError: the run has a hub, so it is not for us to change.
    """
    try:
        return with_endpoint(config, hub_port)
    except UsageError:
        moved = _placed(config, hub_port)
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


def _placed(config: Config, hub_port: int) -> Config:
    """With a free address that is none of the hub's."""
    while (port := free_port_pair(config.hub.host)) in (hub_port, hub_port + 1):
        pass
    endpoint = f"tcp://{config.hub.host}:{port}"
    return config.model_copy(update={"reward": config.reward.model_copy(update={"endpoint": endpoint})})

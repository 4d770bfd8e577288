"""Client processes of peers, as the benchmark drives them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.answering import Answer, Answering, PeerError
from bench.ps.peers.peer import Setting
from bench.ps.roster import Entry, launch


class ClientProcess:
    """One peer's client. It and its shards end when this does.

    Args:
        log: file for what it prints.
        certificates: as `launch` takes them.
    """

    def __init__(
        self, entry: Entry, setting: Setting, log: Path, certificates: Mapping[str, str]
    ) -> None:
        self.entry = entry
        command = launch(entry, Path(setting.peers_dir), certificates)
        if isinstance(command, str):
            raise PeerError(command)
        argv, environment = command
        self._process = Answering([*argv, setting.text()], environment, log)

    def ask(self, do: str, timeout_s: float = 300, **arguments: Any) -> Answer:
        """Give a command; its answer.

        Raises:
            PeerError: it failed, ended or did not answer in time.
        """
        try:
            answer = self._process.ask(timeout_s, do=do, **arguments)
        except PeerError as error:
            raise PeerError(f"{do}: {error}") from None
        if "failed" in answer:
            raise PeerError(f"{do}: {' '.join(answer['failed'].split())}"[:400])
        return answer

    def close(self) -> None:
        """End it; safe to repeat."""
        self._process.close()


def close_all(clients: Sequence[ClientProcess]) -> None:
    """End all."""
    for client in clients:
        client.close()

"""What a job's processes print: read from the nodes while it runs, from Redis afterwards."""

import codecs
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from protos.node_pb2 import ReadLogReply, ReadLogRequest
from protos.scheduler_pb2 import LogChunk
from scheduler.runs.calls import CallError, Channels, Stop, call
from scheduler.runs.processes import AttemptId, Process
from scheduler.state.store import Store, StoreError

KEPT_BYTES = 1 << 20  # of each process, its end
_CHUNK = 256 << 10
_BEYOND = (1 << 63) - 1  # a node answers an offset behind the end with the end
_log = logging.getLogger("heterps.logs")


class JobLogs:
    """The logs of one attempt at a job, while it runs."""

    def __init__(self, attempt: AttemptId, store: Store, channels: Channels) -> None:
        self._attempt = attempt
        self._store = store
        self._channels = channels
        self._lock = threading.Lock()
        self._processes: Sequence[Process] = ()

    def set_processes(self, processes: Sequence[Process]) -> None:
        """The processes have been placed."""
        with self._lock:
            self._processes = [p for p in processes if not p.standing]

    def add_processes(self, processes: Sequence[Process]) -> None:
        """Some processes have taken the place of others, whose logs stay."""
        with self._lock:
            known = {process.process_id for process in self._processes}
            added = [p for p in processes if not p.standing and p.process_id not in known]
            self._processes = [*self._processes, *added]

    def processes(self) -> Sequence[Process]:
        """Processes that have a log."""
        with self._lock:
            return self._processes

    def label(self, process: Process) -> str:
        """The name of a process's log, unique over all attempts."""
        number = self._attempt.number
        again = f" (attempt {number})" if number > 1 else ""
        return f"{process.label}{again}"

    def read(self, process: Process, offset: int, limit: int = _CHUNK) -> ReadLogReply:
        """Bytes of a log from `offset`.

        Raises:
            CallError: its node does not answer, or has no such log.
        """
        reply: ReadLogReply = call(
            self._channels.node(process.node.address).ReadLog,
            ReadLogRequest(process_id=process.process_id, offset=offset, limit=limit),
            what=f"node {process.node.node_id} at {process.node.address}: read the log",
            timeout_s=5.0,
            stop=lambda: False,
        )
        return reply

    def keep(self) -> None:
        """Copy the end of each log to Redis; a node that is gone takes its logs along."""
        job_id = self._attempt.job_id
        for process in self.processes():
            try:
                end = self.read(process, _BEYOND).next_offset
                start = offset = max(0, end - KEPT_BYTES)
                data = b""
                while offset < end:
                    reply = self.read(process, offset)
                    if not reply.data:
                        break
                    data += reply.data
                    offset = reply.next_offset
                self._store.put_log(job_id, self.label(process), start, data)
            except (CallError, StoreError) as error:
                _log.warning("job %s: the log of %s is not kept: %s", job_id, process.label, error)


class LogStream:
    """One reader's way through a job's logs: it gets every byte once, as text.

    Args:
        offsets: what the reader has already, by the names of the logs.
    """

    def __init__(self, job_id: str, store: Store, offsets: Mapping[str, int]) -> None:
        self._job_id = job_id
        self._store = store
        self._offsets = dict(offsets)
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def live(self, logs: JobLogs, stop: Stop) -> Iterator[LogChunk]:
        """What the nodes have beyond what this reader has got."""
        for process in logs.processes():
            label = logs.label(process)
            while not stop():
                try:
                    reply = logs.read(process, self._offsets.get(label, 0))
                except CallError:
                    break  # its node is away, or has not begun; the next round tells
                if not reply.data:
                    break
                yield self._chunk(label, reply.data, reply.next_offset)

    def kept(self) -> Iterator[LogChunk]:
        """What Redis keeps beyond what this reader has got."""
        for label, (start, data) in sorted(self._store.logs(self._job_id).items()):
            offset = self._offsets.get(label, 0)
            if start > offset:
                text = f"[{start - offset} bytes were not kept]\n"
                yield LogChunk(process=label, text=text, next_offset=start)
                offset = start
            for begin in range(offset - start, len(data), _CHUNK):
                part = data[begin : begin + _CHUNK]
                yield self._chunk(label, part, start + begin + len(part))

    def _chunk(self, label: str, data: bytes, next_offset: int) -> LogChunk:
        decoder = self._decoders.get(label)
        if decoder is None:  # a character may be cut in two by a chunk's end
            decoder = self._decoders[label] = codecs.getincrementaldecoder("utf-8")("replace")
        self._offsets[label] = next_offset
        text = decoder.decode(data)
        begun = len(decoder.getstate()[0])
        return LogChunk(process=label, text=text, next_offset=next_offset - begun)


def stream(
    job_id: str,
    store: Store,
    offsets: Mapping[str, int],
    live_logs: Callable[[], JobLogs | None],
    waits: Callable[[], bool],
    pause: Callable[[float], None],
    stop: Stop,
) -> Iterator[LogChunk]:
    """A job's logs to the end.

    Args:
        offsets: what the reader has already, by the names of the logs.
        live_logs: the logs of the job while it runs, None before and after.
        waits: whether there may be more to come and the reader wants to wait for it.
        pause: waits some seconds, less when the reader goes away.
    """
    reader = LogStream(job_id, store, offsets)
    yield from reader.kept()  # of earlier attempts
    while not stop():
        more = waits()  # asked first: what comes later than this is read in the next round
        logs = live_logs()
        if logs is not None:
            yield from reader.live(logs, stop)
        elif not more:
            yield from reader.kept()
        if not more:
            return
        pause(0.3)

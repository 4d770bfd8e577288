"""Processes forked from one that has imported what they need: soon there, their memory shared.

The server is a clean process of one thread, so that forking it is safe: it imports a module, opens
nothing, and forks whenever it is asked. A child runs a module's `main` as a process of its own
would, with the environment and the standard streams that the client gave it, and is shown as one.
"""

import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from chassis import title
from chassis.bounded_log import BoundedLog
from chassis.process import (
    LIFELINE,
    USERS_UMASK,
    Child,
    inherited,
    log_path,
    module_argv,
    ready_path,
    setup_logging,
)

_MESSAGE = 1 << 20  # bytes, an environment among them
_PDEATHSIG = 1
_DUMPABLE = 4
_NONE = -1  # for a pid: the kernel gave none
# For processes to end by themselves after their parent. One that holds the interpreter's lock
# cannot, and the kernel ends it.
_GRACE_S = 0.5
# Arrow's allocator would have a thread.
_ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_log = logging.getLogger("heterps.forks")


class ForkError(RuntimeError):
    """The server is not there, or must not fork: start the process in another way."""


class Forked:
    """A process that the server forked, in the manner of `subprocess.Popen`.

    Attributes:
        returncode: as Popen's.
    """

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        """Note how it ended."""
        if self.returncode is None:
            self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The client's side; the server starts with the first process and again should it have died.

    Args:
        module: imports what processes need; without threads once it is imported.
        directory: of the server's log.
        environment: what the module's libraries read when they are loaded.
    """

    def __init__(self, module: str, directory: Path, environment: Mapping[str, str]) -> None:
        self._module = module
        self._log = log_path(directory, "fork server")
        self._environment = dict(environment)
        self._lock = threading.Lock()  # one request at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # pids; None: it died
        self._useless = False  # it ended before it forked anything
        self._closed = False
        self._known = threading.Lock()
        self._children: dict[int, Forked] = {}
        self._early: dict[int, int] = {}  # ends that were told of before their process was known

    def spawn(
        self,
        label: str,
        module: str,
        arguments: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        log: BoundedLog,
        user: int | None = None,
    ) -> Child:
        """Start a process that ends with us and announces itself: as `chassis.process.spawn`.

        Args:
            module: of which `main(argv) -> int` is run, such as workers.stage.__main__.
            arguments: of that, to which `--ready-file PATH` is appended.

        Raises:
            ForkError: there is no server that could.
        """
        directory.mkdir(parents=True, exist_ok=True)
        ready = ready_path(directory, label)
        ready.unlink(missing_ok=True)
        told = {
            "module": module,
            "arguments": [*arguments, "--ready-file", str(ready)],
            "environment": {**inherited(), **environment, LIFELINE: "1"},
            "user": user,
        }
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        try:
            with self._lock:
                pid = self._ask(json.dumps(told).encode(), [stdin_read, stdout_write])
        except BaseException:
            os.close(stdin_write)
            os.close(stdout_read)
            raise
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
        process = Forked(pid, os.fdopen(stdin_write, "wb", 0), os.fdopen(stdout_read, "rb"))
        with self._known:
            code = self._early.pop(pid, None)
            if code is None:
                self._children[pid] = process
            else:
                process.end(code)
        child = Child(label, process, log.path or log_path(directory, label), ready)
        assert process.stdout is not None
        child.pump = log.pump(process.stdout)
        return child

    def warm(self) -> None:
        """Start the server if it does not run, and do not wait for it: the first process will."""
        if not self._lock.acquire(blocking=False):
            return  # somebody has it start already
        try:
            if self._connection is None and not self._closed and not self._useless:
                self._start()
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the server; what it has forked ends when its standard input does."""
        self._closed = True  # so that one who is starting it hangs up
        self._hang_up()  # first of all: somebody may hold the lock and wait for its answer
        with self._lock:
            self._connection = None
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(2.0)
                self._process.kill()
                self._process.wait()

    def _hang_up(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, message: bytes, descriptors: list[int]) -> int:
        """The pid of a process with these standard streams."""
        if self._closed:
            raise ForkError("the fork server is closed")
        if self._useless:
            raise ForkError(f"{self._module} cannot be forked; see {self._log}")
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            socket.send_fds(self._connection, [message], descriptors)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                self._hang_up()  # whatever the matter is, the next one is told by another
                self._connection = None
            raise ForkError(f"the fork server was not reached: {error}") from None
        pid = self._answers.get()
        if pid is None:
            self._connection = None
            raise ForkError(f"the fork server ended; see {self._log}")
        if pid == _NONE:
            raise ForkError(f"no process could be forked; see {self._log}")
        return pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE)
        if self._process is not None:
            self._process.wait()  # it has ended
        self._log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = str(theirs.fileno())
        argv = module_argv("chassis.forking", self._module, descriptor, title.ROOM)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited(), **self._environment, **_ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection, self._answers = ours, queue.SimpleQueue()
        if self._closed:  # while it started, when there was nothing to hang up
            self._hang_up()
        threading.Thread(
            target=self._listen,
            args=(self._process, ours, self._answers),
            name="forked",
            daemon=True,
        ).start()

    def _listen(
        self,
        server: "subprocess.Popen[bytes]",
        connection: socket.socket,
        answers: queue.SimpleQueue[int | None],
    ) -> None:
        """The thread that hears of processes that began and ended."""
        forked = 0
        while message := _received(connection):
            told = json.loads(message)
            if "began" in told:
                forked += 1
                answers.put(told["began"])
                continue
            with self._known:
                process = self._children.pop(told["ended"], None)
                if process is None:
                    self._early[told["ended"]] = told["code"]
            if process is not None:
                process.end(told["code"])
        # One that was killed says nothing of the next.
        self._useless = not forked and server.wait() >= 0
        with self._known:  # the kernel ends with it all that it has forked
            children, self._children = self._children, {}
        for process in children.values():
            process.end(-signal.SIGKILL)
        answers.put(None)
        connection.close()


def _received(connection: socket.socket) -> bytes:
    """The next message; nothing at the end."""
    try:
        return connection.recv(_MESSAGE)
    except OSError:
        return b""


class _Reaper:
    """The server: one thread that waits for requests and for the ends of what it forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def run(self) -> tuple[str, list[str]] | None:
        """Serve; in each child its module and arguments, at the end None."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._reading, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            with contextlib.suppress(BlockingIOError):
                os.read(self._reading, 4096)
            self._reap(os.WNOHANG)
            if self._connection.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._connection, _MESSAGE, 2)
            if not message:  # the client is gone: its processes end by themselves, or with us
                signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
                self._reap(0)
                return None
            told = json.loads(message)
            pid = _forked()
            if pid == 0:
                self._become(descriptors, told["environment"], told["user"])
                return told["module"], told["arguments"]
            for descriptor in descriptors:
                os.close(descriptor)
            self._tell({"began": pid})

    def _reap(self, options: int) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: seen at the next turn
            self._connection.send(json.dumps(message).encode())

    def _become(
        self, descriptors: Sequence[int], environment: Mapping[str, str], user: int | None
    ) -> None:
        """In the child: what a process that is started has."""
        server = os.getppid()
        prctl = ctypes.CDLL(None).prctl
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.umask(USERS_UMASK)
            prctl(_DUMPABLE, 1)  # else its own files in /proc would be root's
        prctl(_PDEATHSIG, signal.SIGKILL)  # last, as it ends with a change of user
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._reading, self._writing):
            os.close(end)
        self._connection.close()
        os.setsid()
        for target, descriptor in enumerate((*descriptors, descriptors[1])):
            os.dup2(descriptor, target)
        for descriptor in descriptors:
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # else all would draw the same


def _forked() -> int:
    """As `os.fork`; `_NONE` where there may be no more processes, or there is no memory."""
    try:
        return os.fork()
    except OSError as error:
        print(f"no fork: {error}", flush=True)
        return _NONE


@contextlib.contextmanager
def _ends_with(connection: socket.socket) -> Iterator[None]:
    """End at once when the client goes away, in a block that does not listen.

    The kernel tells by a signal: a thread must not be there.
    """
    poll = select.poll()
    poll.register(connection, 0)

    def look(*_: object) -> None:
        if any(event & select.POLLHUP for _, event in poll.poll(0)):
            os._exit(0)

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()  # it may have been before
    try:
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def main(argv: Sequence[str]) -> int:
    """The server, and in its children the exit code of what they run."""
    name, descriptor, _ = argv
    connection = socket.socket(fileno=int(descriptor))
    began = time.monotonic()
    gc.disable()  # imports leave little garbage, and looking for it takes a sixth of their time
    with _ends_with(connection):
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(f"{name} has {threads} threads once imported: no fork would be safe", flush=True)
        os._exit(1)  # without waiting for those
    gc.collect()
    gc.freeze()  # collections in children leave shared memory alone
    gc.enable()
    setup_logging("fork server")
    _log.info("has imported %s in %.1f s", name, time.monotonic() - began)
    asked = _Reaper(connection).run()
    if asked is None:
        return 0
    program, arguments = asked
    sys.argv = [program, *arguments]
    title.show(module_argv(program.removesuffix(".__main__"), *arguments))
    code: int = importlib.import_module(program).main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Who looks a token up waits for nobody: it is done on the thread that serves all calls."""

import threading
from unittest.mock import Mock

from chassis.roles import Role
from scheduler.state.tokens import Tokens


def test_a_token_is_found_while_redis_takes_another() -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    store = Mock(tokens=list)
    tokens = Tokens(store)
    _, secret = tokens.create("first", "read", 0, "root")

    def put(token: object) -> None:
        hangs.set()
        goes_on.wait(60)

    store.put_token = put
    creating = threading.Thread(target=tokens.create, args=("second", "read", 0, "root"))
    creating.start()
    assert hangs.wait(60)
    found: list[object] = []
    finding = threading.Thread(target=lambda: found.append(tokens.find(secret)), daemon=True)
    finding.start()
    finding.join(10)
    goes_on.set()
    creating.join()
    assert [(caller.user, caller.role) for caller in found] == [("first", Role.READ)]

"""Who gets in: hosts, the token, sessions, forms of other sites; without any cluster."""

import re
import ssl
from pathlib import Path

import pytest

from heterps.console.attempts import FREE, MOST, Attempts, TooManyError
from heterps.home import certs
from tests.heterps.consoles import console

pytest.importorskip("fastapi", reason="the console's extra is not installed")
TOKEN = "a-token-of-some-length"
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def locked(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("locked")
    (folder / "token").write_text(TOKEN + "\n")
    environment.setenv("HETERPS_TOKEN_FILE", str(folder / "token"))
    with console(NOWHERE, folder) as running:
        yield running


@pytest.fixture(scope="module")
def unlocked(tmp_path_factory, environment):
    environment.delenv("HETERPS_TOKEN_FILE", raising=False)
    with console(NOWHERE, tmp_path_factory.mktemp("unlocked")) as running:
        yield running


def form_key(text):
    return re.search(r'name="form_key" value="([0-9a-f]{64})"', text)[1]


def cookie(answer):
    return answer.headers["set-cookie"].partition(";")[0]


def test_every_answer_tells_the_browser_what_to_refuse(unlocked):
    for path in ("/", "/static/console.js", "/nothing"):
        headers = unlocked.ask(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"


def test_a_scheduler_that_is_away_is_said(unlocked):
    answer = unlocked.ask("/")
    assert answer.status == 503
    assert "no scheduler answers" in answer.text
    assert unlocked.ask("/nothing").status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "127.0.0.1.evil.example"])
def test_a_name_bound_to_loopback_by_somebody_else_is_refused(unlocked, host):
    assert unlocked.ask("/", host=host).status == 421
    assert unlocked.ask("/static/console.css", host=host).status == 421


def test_loopback_by_any_of_its_names_is_served(unlocked):
    port = unlocked.address.rpartition(":")[2]
    for host in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
        assert unlocked.ask("/static/console.css", host=host).status == 200


def test_other_sites_cannot_act(unlocked):
    there = "/jobs/a/cancel"
    assert unlocked.ask(there, "POST", {}, origin="https://evil.example").status == 403
    assert unlocked.ask(there, "POST", {}, sec_fetch_site="cross-site").status == 403
    assert unlocked.ask(there, "POST", {"form_key": "0" * 64}).status == 403
    assert unlocked.ask(there, "POST", {"form_key": "x" * 100_000}).status == 403


def test_nobody_gets_in_without_the_token(locked):
    assert locked.ask("/").status == 401
    assert locked.ask("/jobs/a/cancel", "POST", {}).status == 401
    assert locked.ask("/", authorization=f"Bearer {TOKEN}x").status == 401
    assert locked.ask("/", authorization=f"Basic {TOKEN}").status == 401
    assert locked.ask("/", cookie="heterps_session=").status == 401
    sent = locked.ask("/nodes?a=b", accept="text/html")
    assert (sent.status, sent.headers["location"]) == (303, "/login?next=%2Fnodes%3Fa%3Db")
    assert locked.ask("/", authorization=f"Bearer {TOKEN}").status == 503, "in, but no scheduler"


def test_the_token_begins_a_session_that_ends(locked):
    login = locked.ask("/login").text
    assert NOWHERE not in login, "a stranger learns nothing"
    key = form_key(login)
    wrong = locked.ask("/login", "POST", {"form_key": key, "token": "no"})
    assert wrong.status == 401
    assert "set-cookie" not in wrong.headers
    assert 'role="alert"' in wrong.text
    assert locked.ask("/login", "POST", {"form_key": "no", "token": TOKEN}).status == 403
    right = locked.ask("/login", "POST", {"form_key": key, "token": TOKEN, "next": "/nodes"})
    assert (right.status, right.headers["location"]) == (303, "/nodes")
    told = right.headers["set-cookie"].lower()
    assert "httponly" in told
    assert "samesite=strict" in told
    assert TOKEN not in told
    session = cookie(right)
    page = locked.ask("/", cookie=session)
    assert page.status == 503
    assert locked.ask("/jobs/a/cancel", "POST", {"form_key": key}, cookie=session).status == 403
    leave = {"form_key": form_key(page.text)}
    assert locked.ask("/logout", "POST", leave, cookie=session).status == 303
    assert locked.ask("/", cookie=session).status == 401


def test_who_shows_too_many_wrong_tokens_has_to_wait(locked):
    here, there = "127.0.0.2", "127.0.0.3"
    key = form_key(locked.ask("/login").text)
    right = {"form_key": key, "token": TOKEN}
    session = cookie(locked.ask("/login", "POST", right, source=here))
    for count in range(FREE + 8):  # each of the later ones doubles the wait
        wrong = {"form_key": key, "token": f"guess {count}"}
        answer = locked.ask("/login", "POST", wrong, source=here)
        if answer.status == 429:
            break
        assert answer.status == 401
    assert count >= FREE
    assert 1 <= int(answer.headers["retry-after"]) <= 2 ** (count - FREE)
    assert "Too many wrong tokens" in answer.text
    assert locked.ask("/login", "POST", right, source=there).status == 303
    assert locked.ask("/", cookie=session, source=here).status == 503, "in, but no scheduler"


def test_tokens_in_headers_count_as_well(locked):
    here = "127.0.0.4"
    for count in range(FREE + 8):
        answer = locked.ask("/", authorization=f"Bearer guess {count}", source=here)
        if answer.status == 429:
            break
        assert answer.status == 401
    assert count >= FREE
    assert int(answer.headers["retry-after"]) >= 1
    assert "Bearer" not in answer.text
    assert locked.ask("/login", source=here).status == 200


def test_waits_double_to_minutes_and_are_forgotten(clock):
    attempts = Attempts(clock)
    waits = []
    for _ in range(FREE + 12):
        while True:
            try:
                assert not attempts.check("a", lambda: False)
                break
            except TooManyError as error:
                waits.append(error.wait_s)
                clock.now += error.wait_s
    assert waits == [min(2**n, 300) for n in range(12)]
    with pytest.raises(TooManyError):
        attempts.check("a", lambda: True)
    clock.now += 300
    assert attempts.check("a", lambda: True)
    assert not any(attempts.check("a", lambda: False) for _ in range(FREE)), "counted anew"
    clock.now += 24 * 3600
    assert not any(attempts.check("a", lambda: False) for _ in range(FREE)), "forgotten"


def test_the_addresses_of_one_network_count_together_and_memory_is_bounded(clock):
    attempts = Attempts(clock)
    for last in range(FREE):
        assert not attempts.check(f"2001:db8::{last}", lambda: False)
        assert not attempts.check("::ffff:192.0.2.1", lambda: False)
    for client in ("2001:db8::ffff", "192.0.2.1"):
        with pytest.raises(TooManyError):
            attempts.check(client, lambda: True)
    assert attempts.check("2001:db8:0:1::", lambda: True)
    for number in range(MOST):
        attempts.check(f"10.0.{number >> 8}.{number & 255}", lambda: False)
    assert len(attempts) == MOST


@pytest.mark.parametrize("goal", ["https://evil.example", "//evil.example", "/\\evil.example", ""])
def test_a_login_leads_to_our_own_pages_alone(locked, goal):
    key = form_key(locked.ask("/login").text)
    answer = locked.ask("/login", "POST", {"form_key": key, "token": TOKEN, "next": goal})
    assert answer.headers["location"] == "/"


def test_others_may_reach_it_over_tls_with_a_token_alone(run, monkeypatch):
    monkeypatch.delenv("HETERPS_TOKEN_FILE", raising=False)
    code, _, err = run("console", "--bind", "0.0.0.0:0", "--scheduler", NOWHERE)
    assert code == 2
    assert "refusing to listen on 0.0.0.0" in err


def test_over_tls_it_speaks_https_and_marks_its_cookie(tmp_path, environment):
    made = certs.make(tmp_path / "certs", [])
    for name, value in made.items():
        environment.setenv(name, value)
    trusted = ssl.create_default_context(cafile=made["HETERPS_TLS_CA"])
    token = Path(made["HETERPS_TOKEN_FILE"]).read_text().strip()
    with console(NOWHERE, tmp_path, bind="0.0.0.0:0", tls=trusted) as running:
        assert running.url.startswith("https://")
        assert running.ask("/").status == 401
        form = {"form_key": form_key(running.ask("/login").text), "token": token}
        answer = running.ask("/login", "POST", form)
        assert answer.status == 303
        assert "secure" in answer.headers["set-cookie"].lower()

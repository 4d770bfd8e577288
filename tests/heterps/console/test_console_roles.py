"""What the console shows to whom: each visitor sees the scheduler through a token of their own."""

import re
import ssl

import pytest

from heterps.console.attempts import FREE
from heterps.home import certs
from protos import scheduler_pb2 as pb
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.heterps.consoles import console
from tests.secured import Secured

pytest.importorskip("fastapi", reason="the console's extra is not installed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    with Secured(folder) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.files.items():
            patch.setenv(name, value)
        trusted = ssl.create_default_context(cafile=folder / "certs" / certs.CA)
        with console(running.scheduler.address, folder, bind="0.0.0.0:0", tls=trusted) as shown:
            yield running, shown


def submit(cluster, token, job_id):
    job = JobSpec(name=job_id)
    job.schedule.offered.types.add(name="none such", price_per_hour=1.0, limit=1)
    with cluster.channel(token) as channel:
        request = pb.SubmitRequest(job_id=job_id, job=job)
        SchedulerStub(channel).Submit(request, timeout=10)


def sign_in(shown, token):
    key = re.search(r'name="form_key" value="([0-9a-f]{64})"', shown.ask("/login").text)[1]
    return shown.ask("/login", "POST", {"form_key": key, "token": token})


def test_each_visitor_sees_what_their_token_may(cluster):
    running, shown = cluster
    tokens = {
        name: running.create(name, role)
        for name, role in (("anna", "submit"), ("bob", "submit"), ("screen", "read"))
    }
    submit(running, tokens["anna"], "of-anna")
    submit(running, tokens["bob"], "of-bob")
    session = {}
    for name, token in (*tokens.items(), ("root", running.root)):
        answer = sign_in(shown, token)
        assert answer.status == 303, name
        session[name] = answer.headers["set-cookie"].partition(";")[0]

    def page(who, path):
        return shown.ask(path, cookie=session[who], accept="text/html")

    for who, sees in (
        ("anna", {"of-anna"}),
        ("bob", {"of-bob"}),
        ("screen", {"of-anna", "of-bob"}),
        ("root", {"of-anna", "of-bob"}),
    ):
        for _ in range(2):  # what one was shown is not shown to the next
            text = page(who, "/").text
            assert {job for job in ("of-anna", "of-bob") if job in text} == sees, who
        for job in ("of-anna", "of-bob"):
            for tail in ("", "/decision", "/logs", "/cancel"):
                status = page(who, f"/jobs/{job}{tail}").status
                assert status == (200 if job in sees else 403), (who, job, tail)
    assert 'id="cancel"' in page("anna", "/jobs/of-anna").text
    assert 'id="cancel"' not in page("screen", "/jobs/of-anna").text
    key = re.search(r'name="form_key" value="([0-9a-f]{64})"', page("screen", "/").text)[1]
    form = {"form_key": key}
    assert shown.ask("/jobs/of-anna/cancel", "POST", form, cookie=session["screen"]).status == 403
    key = re.search(r'name="form_key" value="([0-9a-f]{64})"', page("anna", "/").text)[1]
    form = {"form_key": key}
    assert shown.ask("/jobs/of-bob/cancel", "POST", form, cookie=session["anna"]).status == 403
    assert shown.ask("/jobs/of-anna/cancel", "POST", form, cookie=session["anna"]).status == 303
    assert "cancelled" in page("screen", "/jobs/of-anna").text

    assert shown.ask("/", authorization=f"Bearer {tokens['bob']}").status == 200
    for name in tokens:
        assert running.revoke(name)
    assert shown.ask("/", authorization=f"Bearer {tokens['bob']}").status == 401
    gone = page("anna", "/jobs/of-anna")
    assert (gone.status, gone.headers["location"]) == (303, "/login")
    assert page("anna", "/").status == 303
    assert sign_in(shown, tokens["anna"]).status == 401
    assert page("root", "/").status == 200


def test_tokens_that_open_nothing_count_as_wrong_until_the_sender_waits(cluster):
    _, shown = cluster
    for count in range(FREE + 8):  # each of the later ones doubles the wait
        answer = shown.ask("/", authorization=f"Bearer heterps_{count:043}")
        if answer.status == 429:
            break
        assert answer.status == 401
    assert answer.status == 429

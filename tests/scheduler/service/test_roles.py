"""Tokens with roles, on real servers: each role at each method, users apart, revocation at once."""

import hashlib
import ssl
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest

from chassis.callers import job_token
from chassis.channels import connect
from chassis.refusal import reason_of
from chassis.roles import ROOT, Role
from protos import access_pb2 as access
from protos import artifacts_pb2 as files
from protos import scheduler_pb2 as pb
from protos.access_pb2_grpc import AccessStub
from protos.artifacts_pb2_grpc import ArtifactsStub
from protos.history_pb2_grpc import HistoryStub
from protos.job_pb2 import JobSpec
from protos.reason_pb2 import ANOTHER_USERS_JOB, ROLE_LACKING, TOKEN_REFUSED
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.state.tokens import NameTakenError, TokenError, Tokens
from tests.cluster import Roles
from tests.methods import MAY, STREAMS, every_method
from tests.secured import Secured

WITHIN_S = 5.0  # that docs/security.md promises of a revocation
WAITS = "a type that nobody offers"


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    with Secured(tmp_path_factory.mktemp("roles")) as running:
        yield running


@pytest.fixture
def enter(secured):
    """Stubs for the holder of a token, which is made unless one is given."""
    opened, made = [], []

    def stub(name, role=None, token=None, kind=SchedulerStub):
        if role is not None:
            token = secured.create(name, role)
            made.append(name)
        opened.append(secured.channel(token))
        return kind(opened[-1])

    yield stub
    for channel in opened:
        channel.close()
    for name in made:
        secured.revoke(name)


def submit(stub, job_id, code_digest=""):
    job = JobSpec(name="waits", code_digest=code_digest)
    job.schedule.offered.types.add(name=WAITS, price_per_hour=1.0, limit=1)
    return stub.Submit(pb.SubmitRequest(job_id=job_id, job=job), timeout=10)


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), reason_of(caught.value)


def ask(channel, method):
    """Call with an empty message; the code and the reason of the answer."""
    takes, gives = STREAMS.get(method, (False, False))
    shape = f"{'stream' if takes else 'unary'}_{'stream' if gives else 'unary'}"
    call = getattr(channel, shape)(method)
    try:
        answer = call(iter([b""]) if takes else b"", timeout=20)
        if gives:
            list(answer)
    except grpc.RpcError as error:
        return error.code(), reason_of(error)
    return grpc.StatusCode.OK, 0


NOBODY = (grpc.StatusCode.UNAUTHENTICATED, TOKEN_REFUSED)
LACKING = (grpc.StatusCode.PERMISSION_DENIED, ROLE_LACKING)


def test_each_role_at_each_method_of_a_scheduler_a_node_and_a_shard(secured):
    made = {role: secured.create(f"one-{role}", role) for role in ("read", "submit", "operate")}
    gone = secured.create("gone", "operate")
    assert secured.revoke("gone")
    made |= {"job": job_token(secured.root, "anna", "some"), "cluster": secured.root}
    node = secured.roles.start(
        "workers.node",
        *("--type", "cpu", "--scheduler", secured.scheduler.address),
        **secured.files,
    )
    shard = secured.roles.start("ps.server", **secured.files)
    servers = {
        secured.scheduler.address: ("Scheduler", "Access", "Artifacts", "History"),
        node.address: ("Node",),
        shard.address: ("ParameterServer",),
    }
    by_method = {
        method: address
        for address, services in servers.items()
        for method in every_method()
        if method.split("/")[1].removeprefix("heterps.v1.") in services
    }
    left_out = every_method() - set(by_method)
    assert {method.split("/")[1] for method in left_out} == {"heterps.v1.Stage"}
    wrong = []
    for role, token in (*made.items(), ("gone", gone), ("none", None)):
        for address in servers:
            with secured.channel(token, address) as channel:
                for method in (one for one, at in by_method.items() if at == address):
                    # People's tokens are known to the scheduler alone.
                    known = address == secured.scheduler.address or role in ("job", "cluster")
                    if role in ("gone", "none") or not known:
                        expected = ask(channel, method) == NOBODY
                    elif method in MAY[role]:
                        expected = ask(channel, method) not in (NOBODY, LACKING)
                    else:
                        expected = ask(channel, method) == LACKING
                    if not expected:
                        wrong.append((role, method, ask(channel, method)))
    assert not wrong
    node.stop()
    shard.stop()


def test_users_see_and_cancel_their_own_jobs_alone(enter):
    anna, bob = enter("anna", "submit"), enter("bob", "submit")
    reads, operates = enter("screen", "read"), enter("carol", "operate")
    submit(anna, "of-anna")
    submit(bob, "of-bob")
    about = pb.JobRequest(job_id="of-anna")
    assert anna.GetJob(about, timeout=5).submitted_by == "anna"
    for call in (bob.GetJob, bob.CancelJob, bob.GetDecision, bob.GetReplan):
        assert refusal(lambda call=call: call(about, timeout=5))[1] == ANOTHER_USERS_JOB
    for call in (bob.WatchJob, bob.Logs):
        kind = pb.LogsRequest if call is bob.Logs else pb.JobRequest
        stream = kind(job_id="of-anna")
        assert refusal(lambda c=call, s=stream: list(c(s, timeout=5)))[1] == ANOTHER_USERS_JOB
    report = pb.ProgressReport(job_id="of-anna", phase="done")
    assert refusal(lambda: bob.Report(report, timeout=5))[1] == ANOTHER_USERS_JOB
    with pytest.raises(grpc.RpcError) as caught:
        submit(bob, "of-anna")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS, "though it is the same job"
    listed = {
        who: [job.job_id for job in stub.ListJobs(pb.ListJobsRequest(), timeout=5).jobs]
        for who, stub in (("anna", anna), ("bob", bob), ("reads", reads), ("operates", operates))
    }
    assert listed["anna"] == ["of-anna"]
    assert listed["bob"] == ["of-bob"]
    assert listed["reads"] == listed["operates"] == ["of-anna", "of-bob"]
    assert refusal(lambda: reads.CancelJob(about, timeout=5))[1] == ROLE_LACKING
    assert anna.GetJob(about, timeout=5).state == pb.QUEUED, "nobody has cancelled it"
    ended = operates.CancelJob(about, timeout=20)
    assert (ended.state, ended.submitted_by, ended.cancelled_by) == (pb.CANCELLED, "anna", "carol")
    bobs = bob.CancelJob(pb.JobRequest(job_id="of-bob"), timeout=20)
    assert bobs.cancelled_by == "bob"


def sent(stub, data, job_id="", name=""):
    digest = hashlib.sha256(data).hexdigest()
    header = files.PutHeader(digest=digest, bytes=len(data), job_id=job_id, name=name)
    stub.Put(iter([files.PutChunk(header=header, data=data)]), timeout=10)
    return digest


def fetched(stub, **what):
    request = files.GetArtifactRequest(**what)
    return b"".join(chunk.data for chunk in stub.Get(request, timeout=10))


def test_code_and_files_of_a_job_are_its_users_alone(secured, enter):
    tokens = {name: secured.create(name, "submit") for name in ("owner", "other")}
    owner = enter("owner", token=tokens["owner"])
    mine = enter("owner", token=tokens["owner"], kind=ArtifactsStub)
    theirs = enter("other", token=tokens["other"], kind=ArtifactsStub)
    digest = sent(mine, b"the code of a job")
    submit(owner, "coded", digest)
    assert fetched(mine, digest=digest) == b"the code of a job"
    assert fetched(mine, job_id="coded", name="code.tar.gz") == b"the code of a job"
    for what in ({"digest": digest}, {"job_id": "coded", "name": "code.tar.gz"}):
        assert refusal(lambda what=what: fetched(theirs, **what))[1] == ANOTHER_USERS_JOB
    listing = files.ListArtifactsRequest(job_id="coded")
    removal = files.RemoveArtifactsRequest(job_id="coded", name="code.tar.gz")
    for call, request in ((theirs.List, listing), (theirs.Remove, removal)):
        assert refusal(lambda c=call, r=request: c(r, timeout=5))[1] == ANOTHER_USERS_JOB
    assert refusal(lambda: sent(theirs, b"another", "coded", "model"))[1] == ANOTHER_USERS_JOB
    about = pb.JobRequest(job_id="coded")
    screen = enter("screen", "read")
    assert not screen.GetJob(about, timeout=5).job.code_digest, "it would open the code"
    assert owner.GetJob(about, timeout=5).job.code_digest == digest
    its_own = enter("", token=job_token(secured.root, "owner", "coded"), kind=ArtifactsStub)
    assert len(its_own.List(listing, timeout=5).files) == 1
    assert refusal(lambda: sent(its_own, b"code"))[1] == ANOTHER_USERS_JOB
    another = enter("", token=job_token(secured.root, "owner", "another"), kind=ArtifactsStub)
    assert refusal(lambda: another.List(listing, timeout=5))[1] == ANOTHER_USERS_JOB
    operates = enter("boss", "operate", kind=ArtifactsStub)
    assert fetched(operates, digest=digest) == b"the code of a job"
    for name in tokens:
        secured.revoke(name)


def test_a_revoked_token_opens_nothing_more_not_even_what_it_holds_open(secured, enter):
    dave = enter("dave", "submit")
    submit(dave, "of-dave")
    streams = [
        dave.WatchJob(pb.JobRequest(job_id="of-dave"), timeout=60),
        dave.Logs(pb.LogsRequest(job_id="of-dave", follow=True), timeout=60),
    ]
    assert next(iter(streams[0])).state == pb.QUEUED
    ended = {}

    def read(number, stream):
        try:
            list(stream)
        except grpc.RpcError as error:
            ended[number] = (error.code(), reason_of(error), time.monotonic())

    readers = [threading.Thread(target=read, args=pair) for pair in enumerate(streams)]
    for reader in readers:
        reader.start()
    revoked = time.monotonic()
    assert secured.revoke("dave")
    assert not secured.revoke("dave")
    assert refusal(lambda: dave.ListJobs(pb.ListJobsRequest(), timeout=5)) == NOBODY
    for reader in readers:
        reader.join(30)
    assert {number: one[:2] for number, one in ended.items()} == {0: NOBODY, 1: NOBODY}
    assert max(one[2] for one in ended.values()) - revoked < 6 * WITHIN_S, "only a hang reaches it"
    again = enter("dave", "submit")
    assert again.GetJob(pb.JobRequest(job_id="of-dave"), timeout=5).submitted_by == "dave"


def test_tokens_outlive_a_scheduler_and_revoked_ones_do_not_come_back(tmp_path):
    with Secured(tmp_path) as own:
        stays, gone = own.create("stays", "read"), own.create("gone", "read")
        assert own.revoke("gone")
        own.scheduler.stop()
        own.scheduler = own.serve()
        with own.channel(stays) as channel:
            said = AccessStub(channel).WhoAmI(access.WhoAmIRequest(), timeout=10)
            assert (said.user, said.role) == ("stays", Role.READ)
        with own.channel(gone) as channel:
            assert ask(channel, "/heterps.v1.Access/WhoAmI") == NOBODY
        with own.channel(own.root) as channel:
            found = AccessStub(channel).ListTokens(access.ListTokensRequest(), timeout=10).tokens
            said = AccessStub(channel).WhoAmI(access.WhoAmIRequest(), timeout=10)
        assert (said.user, said.role) == (ROOT, Role.CLUSTER)
        assert [(one.name, one.created_by, one.digest) for one in found] == [("stays", ROOT, b"")]


def test_the_figures_of_shards_come_with_a_token_only_for_who_may_act(secured, enter):
    submit(enter("erin", "submit"), "of-erin")
    history = enter("screens", "read", kind=HistoryStub)
    found = history.GetHistory(pb.JobRequest(job_id="of-erin"), timeout=5)
    assert not any(shard.token for shard in found.shards)


def test_metrics_open_to_who_may_see_all_jobs(secured):
    trusted = ssl.create_default_context(cafile=secured.files["HETERPS_TLS_CA"])
    url = f"https://{secured.scheduler.facts['metrics']}/metrics"
    opened = {}
    for role in ("read", "submit", "operate"):
        secret = secured.create(f"scrapes-{role}", role)
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {secret}"})
        try:
            with urllib.request.urlopen(asked, timeout=20, context=trusted) as answer:
                opened[role] = answer.status
        except urllib.error.HTTPError as error:
            opened[role] = error.code
        secured.revoke(f"scrapes-{role}")
    assert opened == {"read": 200, "submit": 401, "operate": 200}


def test_without_tls_nobody_is_asked_so_no_token_is_made(tmp_path):
    with Roles(tmp_path) as roles:
        child = roles.scheduler()
        with connect(child.address) as channel:
            stub = AccessStub(channel)
            said = stub.WhoAmI(access.WhoAmIRequest(), timeout=10)
            assert (said.user, said.role) == ("", Role.CLUSTER)
            request = access.CreateTokenRequest(name="anna", role="read")
            code, _ = refusal(lambda: stub.CreateToken(request, timeout=10))
            assert code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_token_expires_and_its_secret_is_kept_nowhere(store):
    clock = Clock()
    tokens = Tokens(store, clock)
    token, secret = tokens.create("anna", "submit", 60.0, ROOT)
    assert token.expires_at == clock.now + 60.0
    assert tokens.find(secret).user == "anna"
    assert tokens.find(secret + "x") is None
    kept = store._do("HGETALL", "heterps:tokens")
    assert secret.encode() not in b"".join(kept.values())
    with pytest.raises(NameTakenError):
        tokens.create("anna", "read", 0.0, ROOT)
    clock.now += 60.0
    assert tokens.find(secret) is None
    assert Tokens(store, clock).find(secret) is None
    with pytest.raises(NameTakenError):
        tokens.create("anna", "read", 0.0, ROOT)
    assert tokens.revoke("anna")
    assert Tokens(store, clock).all() == []


BAD = (
    *({"name": name} for name in (ROOT, "", "a:b", "x" * 65)),
    *({"role": role} for role in ("cluster", "job", "")),
    *({"expires_s": seconds} for seconds in (-1.0, float("nan"), float("inf"))),
)


def test_a_token_that_cannot_be_is_refused(store):
    tokens = Tokens(store)
    for bad in BAD:
        with pytest.raises(TokenError):
            tokens.create(**{"name": "anna", "role": "read", "expires_s": 0.0, "by": ROOT, **bad})
    assert store.tokens() == []


def test_a_job_goes_on_from_what_its_user_may_see_alone(enter, secured):
    anna, ben = enter("anna", "submit"), enter("ben", "submit")
    submit(anna, "annas")
    anna.CancelJob(pb.JobRequest(job_id="annas"), timeout=30)
    job = JobSpec(name="waits")
    job.schedule.offered.types.add(name=WAITS, price_per_hour=1.0, limit=1)
    job.train.resume.job_id, job.train.resume.step = "annas", 10
    job.train.resume.place = "heterps://anywhere:1/annas/cuts/10"

    def go_on(stub, job_id):
        return refusal(lambda: stub.Submit(pb.SubmitRequest(job_id=job_id, job=job), timeout=10))

    assert go_on(ben, "bens") == (grpc.StatusCode.PERMISSION_DENIED, ANOTHER_USERS_JOB)
    job.train.resume.job_id = "bens"  # the files are anna's all the same
    assert go_on(ben, "bens") == (grpc.StatusCode.PERMISSION_DENIED, ANOTHER_USERS_JOB)
    job.train.resume.job_id = "annas"
    assert go_on(anna, "more")[0] is grpc.StatusCode.FAILED_PRECONDITION, "nothing is kept of it"
    assert refusal(lambda: anna.GetJob(pb.JobRequest(job_id="more"), timeout=10))[0] is (
        grpc.StatusCode.NOT_FOUND
    )

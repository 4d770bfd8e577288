"""One trace of a step over real processes, received by a real OTLP endpoint; nothing when off."""

import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from chassis import tracing

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "heterps.v1.ParameterServer"
# A worker, but for the model: 2 shards, a pull and a push within a step, calls outside of one.
TRAINER = """
import numpy as np
from ps import LocalShards, ParameterClient, ShardError
from chassis import tracing
tracing.begin_job("job-1")
with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
    client.create_table("user", 4)
    keys = np.arange(1000)
    with tracing.span("pull ahead", step=7):
        client.pull("user", keys)
    with tracing.span("step", step=7, rank=3):
        client.push_async("user", keys, np.ones((1000, 4), np.float32)).result()
    with tracing.span("odd"):
        try:
            client.load("/no/such/place")
        except Exception:
            pass
        try:
            with ParameterClient(["127.0.0.1:1"], timeout_s=0.1) as away:
                away.stats()
        except ShardError:
            pass
    client.stats()
"""


@dataclass(frozen=True)
class Seen:
    name: str
    service: str
    process: str
    span: Span

    @property
    def attributes(self) -> dict[str, object]:
        return {
            one.key: getattr(one.value, one.value.WhichOneof("value"))
            for one in self.span.attributes
        }


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """What a collector does: takes spans in."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            facts = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    who = facts["service.name"], facts["service.instance.id"]
                    self.seen.append(Seen(span.name, *who, span))
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver():
    found = Receiver()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found
    server.stop(1)


def run(script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
    )


def test_a_step_is_one_trace_over_worker_and_shards(receiver):
    run(TRAINER, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.port}")
    named = defaultdict(list)
    for one in receiver.seen:
        named[one.name, one.span.kind].append(one)
    (ahead,) = named["pull ahead", Span.SPAN_KIND_INTERNAL]
    (step,) = named["step", Span.SPAN_KIND_INTERNAL]
    assert step.attributes == {"heterps.job": "job-1", "heterps.step": 7, "rank": 3}
    assert not step.span.parent_span_id
    trace_id = step.span.trace_id
    assert ahead.span.trace_id == trace_id, "the spans of a step, whatever began them"
    for method, cause in (("Pull", ahead), ("Push", step)):
        calls = named[f"{SERVICE}/{method}", Span.SPAN_KIND_CLIENT]
        answers = named[f"{SERVICE}/{method}", Span.SPAN_KIND_SERVER]
        assert len(calls) == len(answers) == 2, "one to each shard"
        assert {one.span.parent_span_id for one in calls} == {cause.span.span_id}
        assert {a.span.parent_span_id for a in answers} == {c.span.span_id for c in calls}
        assert {one.span.trace_id for one in (*calls, *answers)} == {trace_id}
        assert {one.attributes["rpc.grpc.status_code"] for one in (*calls, *answers)} == {0}
        assert len({one.attributes["server.address"] for one in calls}) == 2
        assert {one.service for one in calls} == {"heterps"}
        assert {one.service for one in answers} == {"heterps-ps"}
        assert len({one.process for one in (*calls, *answers)}) == 3
    (odd,) = named["odd", Span.SPAN_KIND_INTERNAL]
    assert odd.span.trace_id != trace_id
    failed = [one for one in receiver.seen if one.span.status.code == Status.STATUS_CODE_ERROR]
    assert {one.span.trace_id for one in failed} == {odd.span.trace_id}
    unreached = [one for one in failed if one.span.status.message == "UNAVAILABLE"]
    assert unreached, "each attempt is a span"
    assert {one.attributes["server.address"] for one in unreached} == {"127.0.0.1:1"}
    outside = {f"{SERVICE}/CreateTable"} & {one.name for one in receiver.seen}
    assert not outside, "calls that are no part of a span are not traced"


def test_all_processes_of_a_job_agree_on_the_trace_of_a_step(receiver):
    script = (
        "from chassis import tracing; tracing.begin_job({!r})\n"
        "for step in (1, 2):\n"
        "    with tracing.span('step', step=step): pass"
    )
    endpoint = f"http://127.0.0.1:{receiver.port}"
    for job in ("a", "a", "b"):
        run(script.format(job), OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    traces = defaultdict(set)
    for one in receiver.seen:
        traces[one.span.trace_id].add((one.attributes["heterps.job"], one.process))
    assert sorted(len(found) for found in traces.values()) == [1, 1, 2, 2]
    assert all(len({job for job, _ in found}) == 1 for found in traces.values())


def test_the_console_shows_spans_apart_from_the_output():
    script = "from chassis.tracing import span\nwith span('hello', x=1): print('{}')"
    done = run(script, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="mine")
    assert done.stdout == "{}\n"
    assert '"name": "hello"' in done.stderr
    assert '"service.name": "mine"' in done.stderr


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:1"}, ""),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "console"}, ""),
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER=jaeger: expected otlp"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "expected grpc",
        ),
    ],
)
def test_off_is_really_off(environment, said):
    script = (
        "import sys; from concurrent.futures import ThreadPoolExecutor\n"
        "submit = ThreadPoolExecutor.submit\n"
        "from chassis import tracing; from chassis.channels import connect\n"
        "with tracing.span('step', step=1): assert tracing.inject() == ()\n"
        "assert tracing.span('a') is tracing.span('b')\n"
        "assert ThreadPoolExecutor.submit is submit\n"
        "print(tracing.ON, 'opentelemetry' in sys.modules, type(connect('127.0.0.1:1')).__module__)"
    )
    done = run(script, **environment)
    assert done.stdout.split() == ["False", "False", "grpc._channel"]
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


def test_a_missing_extra_is_named_and_harms_nothing(tmp_path):
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry/__init__.py").write_text("raise ImportError('not installed')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from chassis import tracing\n"
        "with tracing.span('step'): print(tracing.ON)"
    )
    done = run(script, OTEL_TRACES_EXPORTER="console")
    assert done.stdout == "False\n"
    assert "pip install 'heterps[tracing]'" in done.stderr


def test_this_process_is_not_traced():
    assert not tracing.ON, "unset OTEL_* to run the tests"

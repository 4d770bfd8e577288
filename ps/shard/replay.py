"""Changes that a journal has kept, repeated in their order."""

from protos import parameter_server_pb2 as pb
from protos.codec import unpack
from ps.shard import stage
from ps.shard.commit import commit_step, stage_part
from ps.shard.push import take_apart
from ps.shard.state import ShardState


def replay(state: ShardState, record: pb.LogRecord, payload: memoryview) -> None:
    """Repeat a change that a journal has kept."""
    if record.kind == "push":
        head, body = unpack(pb.PushRequest, bytes(payload))
        if head.table in state.tables:
            state.push(take_apart(head, body, payload), record.time_s, journal=False)
    elif record.kind == "stage":
        part = stage.part_of(payload, state.buckets)
        if part.is_made:
            state.steps.put(part)
        else:
            stage_part(state, part, journal=False)
    elif record.kind == "commit":
        request, body = unpack(pb.CommitRequest, bytes(payload))
        carried = None
        if request.HasField("part"):
            carried = stage.carried_part(request, body, payload, state.buckets)
        commit_step(state, request, carried, payload, record.time_s, journal=False)
    elif record.kind == "create":
        state.create(pb.TableSpec.FromString(bytes(payload)), journal=False)
    elif record.kind == "drop":
        state.drop(bytes(payload).decode(), journal=False)
    elif record.kind == "shrink":
        state.shrink(pb.ShrinkRequest.FromString(bytes(payload)), journal=False)
    elif record.kind == "absorb":
        state.absorb(pb.StateBlock.FromString(bytes(payload)), journal=False)
    elif record.kind == "route":
        state.install(pb.RouteRequest.FromString(bytes(payload)), journal=False)
    elif record.kind == "state":
        state.take_over(pb.StateBlock.FromString(bytes(payload)))
    else:
        raise ValueError(f"a log record of kind {record.kind!r}")

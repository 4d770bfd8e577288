"""Processes, in groups of 2, 4 and so on, each checking its part of a split layer.

    python expert_parallel_ranks.py FOLDER PROCESSES

What each layer should give, every rank works out by itself: the whole layer on each process's
tokens, losses summed. Rank r writes FOLDER/r.json: the largest error by "case on n".
"""

import copy
import json
import multiprocessing
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from protos.stage_pb2 import JoinReply, JoinRequest
from workers.learning.reduction import reduce_gradients, reduced_over
from workers.links.all_reduce import Rendezvous, StageGroup, join_processes
from workers.links.ring import Ring
from workers.links.ring_port import RingPort
from workers.moe.group import ExpertGroup, Rates
from workers.moe.layer import MoE
from workers.stage.experts.split import split_experts, whole_state

WORLD = int(sys.argv[2])
DIM = 6
FAST_NETWORK = Rates(flops_per_s=1.0, bytes_per_s=1e12)  # weights cost nothing: shadow what helps
SLOW_NETWORK = Rates(flops_per_s=1e12, bytes_per_s=1.0)  # what counts is which are more bytes
UNEVEN = [5, 3, 17, 0, 0, 0, 9, 1]
ONE_SENDS = [0, 23, 0, 0, 0, 0, 0, 0]


def small_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, DIM))


# Options of MoE, or of the case: tokens of each rank, and what is done to the layer.
CASES: dict[str, dict[str, Any]] = {
    "random loads": {},
    "more experts than tokens": {"experts": 29},
    "one token": {"tokens": [0, 1, 0, 0, 0, 0, 0, 0]},
    "no tokens at all": {"tokens": [0] * 8},
    "one process sends": {"tokens": ONE_SENDS},
    "one expert takes everything": {"k": 1, "gate_bias": True, "gate": "switch", "jitter": 0.0},
    "capacity": {"capacity_factor": 0.75},
    "prototypes, swiglu, shared": {"gate": "prototype", "k": 2, "experts": 8,
                                   "activation": "swiglu", "shared_experts": 1},
    "modules": {"expert": small_expert},
    "inputs without gradient": {"x_gradient": False, "tokens": ONE_SENDS},
    "chunks": {"chunks": 3},
    "more chunks than rows": {"chunks": 9, "tokens": ONE_SENDS},
    "two hops": {"hosts": True},
    "two hops, one expert": {"hosts": True, "k": 1, "gate_bias": True},
    "two hops, chunks": {"hosts": True, "chunks": 2},
    "shadows": {"rates": FAST_NETWORK, "gate_bias": True},
    "shadows of modules": {"rates": FAST_NETWORK, "gate_bias": True, "expert": small_expert},
    "shadows, two hops, chunks": {"rates": FAST_NETWORK, "gate_bias": True, "hosts": True,
                                  "chunks": 2},
    "shadows without inputs": {"rates": SLOW_NETWORK, "hidden": 1, "gate_bias": True,
                               "x_gradient": False, "tokens": ONE_SENDS},
    "shadows do not pay": {"rates": SLOW_NETWORK, "gate_bias": True, "hidden": 300},
    "shadows by measured rates": {"measure": True, "gate_bias": True},
}  # fmt: skip


def tokens_of(counts: list[int], size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, DIM, generator=generator, dtype=torch.float64) for n in counts[:size]]


def directions_of(xs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in xs]


def largest(errors: list[Tensor]) -> float:
    return max((e.abs().max().item() for e in errors if e.numel()), default=0.0)


def check(name: str, groups: dict[bool, ExpertGroup]) -> float:
    """The largest error of outputs and gradients of this rank."""
    options = {"experts": 11, "hidden": 5, "k": 2, "seed": 3} | CASES[name]
    counts, gate_bias = options.pop("tokens", UNEVEN), options.pop("gate_bias", False)
    x_gradient, hosts = options.pop("x_gradient", True), options.pop("hosts", False)
    rates, measure = options.pop("rates", None), options.pop("measure", False)
    chunks = options.pop("chunks", 1)
    if "expert" in options:
        del options["hidden"]
    group = groups[hosts]
    group.rates = rates
    processes, rank, size = group.processes, group.rank, group.size
    shadow = measure or rates is not None
    split = MoE(DIM, **options, group=group, chunks=chunks, shadow=shadow).double()
    whole = MoE(DIM, **options).double()
    xs = tokens_of(counts, size)
    if gate_bias:  # the first expert is far above all others
        for layer in (split, whole):
            with torch.no_grad():
                layer.gate.weight.zero_()
                layer.gate.weight[0, 0] = 9
        for x in xs:
            x[:, 0] = x[:, 0].abs() + 1
    xs = [x.requires_grad_(x_gradient) for x in xs]
    directions = directions_of(xs)
    outs = [whole(x) for x in xs]
    auxiliary = []
    for x, out, direction in zip(xs, outs, directions, strict=True):
        whole(x)
        auxiliary.append(whole.aux_loss)
        ((out * direction).sum() + whole.aux_loss).backward()
    mine = xs[rank].detach().requires_grad_(x_gradient)
    bits = []
    for _ in range(2):  # equal bits from run to run, and gradients that do not add up
        split.zero_grad(set_to_none=True)
        mine.grad = None
        out = split(mine)
        ((out * directions[rank]).sum() + split.aux_loss).backward()
        reduce_gradients(split, processes)
        bits.append([out.detach(), *(p.grad for p in split.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *bits))
    errors = [out - outs[rank], split.aux_loss - auxiliary[rank]]
    if x_gradient:
        errors.append(mine.grad - xs[rank].grad)
    errors += gradient_errors(split, whole)
    stats = split.stats().parallel
    assert stats is not None
    assert stats.load.sum(0).tolist() == together(whole, xs, stats.load)
    if shadow:
        shadowing = stats.shadowing
        assert shadowing is not None
        if name == "shadows do not pay":
            assert shadowing.experts == ()
        elif rates is not None:
            assert 0 in shadowing.experts
            assert shadowing.seconds < shadowing.seconds_without
        everyone = [None] * size
        dist.all_gather_object(everyone, shadowing, group=processes)
        assert all(other == shadowing for other in everyone)
        assert min(shadowing.rates.flops_per_s, shadowing.rates.bytes_per_s) > 0
    return largest(errors)


def gradient_errors(split: MoE, whole: MoE) -> list[Tensor]:
    def of(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    assert split.parallel is not None
    own = split.parallel.own
    errors = []
    wanted = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        assert (reduced_over(parameter) == "expert") == name.startswith(("w1", "w2", "experts."))
        if name.startswith("experts."):
            _, place, rest = name.split(".", 2)
            errors.append(of(parameter) - of(wanted[f"experts.{own[int(place)]}.{rest}"]))
        elif reduced_over(parameter) == "expert":
            errors.append(of(parameter) - of(wanted[name])[own.start : own.stop])
        else:
            errors.append(of(parameter) - of(wanted[name]))
    return errors


def together(whole: MoE, xs: list[Tensor], load: Tensor) -> list[int]:
    """The load of all tokens; a capacity, which is each process's own, leaves fewer."""
    if whole.capacity_factor is not None:
        return load.sum(0).tolist()
    return torch.stack([(whole(x), whole.load)[1] for x in xs]).sum(0).tolist()


def check_bias(group: ExpertGroup) -> float:
    """The bias moves by the load of all processes, as one process on all tokens moves it."""
    split = MoE(DIM, 11, gate="bias", rate=0.1, seed=3, group=group.processes).double()
    whole = MoE(DIM, 11, gate="bias", rate=0.1, seed=3).double()
    xs = tokens_of(UNEVEN, group.size)
    for _ in range(3):
        whole(torch.cat(xs)).sum().backward()
        split(xs[group.rank]).sum().backward()
    assert whole.gate.bias.abs().max() > 0
    assert copy.deepcopy(split).parallel.group is split.parallel.group
    return largest([split.gate.bias - whole.gate.bias])


def check_autocast(group: ExpertGroup) -> float:
    """Processes without rows have the dtype of those with some."""
    split = MoE(DIM, 11, seed=3, group=group)
    whole = MoE(DIM, 11, seed=3)
    x = tokens_of(ONE_SENDS, group.size)[group.rank].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = split(x), whole(x)
    out.sum().backward()
    return 1e-9 * largest([(out - expected).float()]) / 0.05  # bfloat16's own error is allowed


def check_stage(rank: int, folder: Path) -> float:
    """The reducer of a stage sums replicas, and leaves experts and their tags alone."""
    dist.destroy_process_group()
    cpu = torch.device("cpu")
    join_processes(rank, WORLD, *meet(rank, folder / "stage"), cpu)
    stage = StageGroup(cpu, ring_of(rank), has_processes=True)
    layer = MoE(DIM, 8, seed=rank, group=dist.group.WORLD)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    before = [p.detach().clone() for p in (layer.w1, layer.w2)]
    stage.share_parameters(list(layer.parameters()))
    load = torch.full((3,), float(rank))
    (loss,) = stage.sum_gradients(list(layer.parameters()), [torch.tensor(0.5)], [load])
    total = sum(range(1, WORLD + 1))
    errors = [layer.gate.weight.grad - total, layer.w1.grad - (rank + 1.0), load - (total - WORLD)]
    errors += [layer.w1 - before[0], layer.w2 - before[1], loss - 0.5 * WORLD]
    errors += whole_again(stage)
    stage.barrier()
    stage.close()
    return largest(errors)


def ring_of(rank: int) -> Ring:
    port = RingPort(rank, WORLD, "127.0.0.1")
    replies: list[Any] = [None] * WORLD
    before = (rank - 1) % WORLD
    admitted = port.admit(JoinRequest(rank=before, size=WORLD)).SerializeToString()
    dist.all_gather_object(replies, admitted)
    after = JoinReply.FromString(replies[(rank + 1) % WORLD])
    return port.join(after, "127.0.0.1", lambda: False)


def whole_again(stage: StageGroup) -> list[Tensor]:
    """What a job saves of a stage whose experts were split is what it would be of whole ones."""
    torch.manual_seed(7)
    module = nn.ModuleDict(
        {
            "stacked": MoE(DIM, 11, hidden=5),
            "own": nn.Sequential(MoE(DIM, 9, expert=small_expert)),
            "few": MoE(DIM, 3),
        }
    )
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert split_experts(module, stage) == ["stacked", "own.0"]
    assert len(module["stacked"].w1) < 11
    after = whole_state(module, stage)
    assert after.keys() == before.keys()
    return [after[name] - tensor for name, tensor in before.items()]


def meet(rank: int, file: Path) -> tuple[str, Rendezvous | None]:
    """The address of rank 0's store, by way of a file."""
    own = Rendezvous("127.0.0.1") if rank == 0 else None
    if own:
        file.with_suffix(".part").write_text(own.address)
        file.with_suffix(".part").rename(file)
    while not file.is_file():
        time.sleep(0.01)
    return file.read_text(), own


def rank_main(rank: int, folder: Path) -> None:
    signal.alarm(480)  # none outlives a parent that was killed
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    try:
        address, own = meet(rank, folder / "groups")
        port = int(address.rpartition(":")[2])
        store = own.store if own else dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        for size in (2**n for n in range(1, WORLD.bit_length())):
            # Made by all, also by ranks that then have nothing to do.
            by_host = ExpertGroup.of_hosts(2, size) if size > 2 else None
            processes = by_host.processes if by_host else dist.new_group([0, 1])
            if rank >= size:
                continue
            plain = ExpertGroup(processes)
            groups = {False: plain, True: by_host or plain}
            for name in CASES:
                found[f"{name} on {size}"] = check(name, groups)
            found[f"bias on {size}"] = check_bias(groups[False])
            found[f"autocast on {size}"] = check_autocast(groups[False])
        dist.barrier()
        found["stage"] = check_stage(rank, folder)
    except BaseException:
        found["failed"] = traceback.format_exc()
        raise
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(found))


def main() -> int:
    folder = Path(sys.argv[1])
    # Forked before any thread is there, so that torch is imported once.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, folder)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):  # the others would wait for it
            time.sleep(0.5)
            for process in ranks:
                process.kill()
        ranks[0].join(0.05)
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())

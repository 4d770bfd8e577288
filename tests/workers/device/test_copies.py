"""Copies to a device and back: the same contract on a CPU, through copying streams, on a GPU."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from workers.device.copies import Buffers, CopyStreams, OnHost, staging_for
from workers.stage.report.busy import BusyClock

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TENSORS = [
    torch.arange(12.0).view(3, 4),
    torch.arange(12.0).view(3, 4).t(),
    torch.tensor([[-1, 2**62]]),
    torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    torch.tensor([True, False]),
    torch.tensor(2.5, dtype=torch.float64),
    torch.empty(0, 7),
]


@pytest.fixture(
    params=["on host", "streams of a CPU", pytest.param("streams of a GPU", marks=pytest.mark.gpu)]
)
def staged(request):
    """A staging and its device."""
    if request.param == "on host":
        return OnHost(), CPU
    if request.param == "streams of a CPU":
        return CopyStreams(CPU), CPU
    if not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    return CopyStreams(GPU), GPU


def test_tensors_go_and_come_back_whole(staged):
    staging, device = staged
    there = [staging.upload(tensor).here() for tensor in TENSORS]
    for tensor, copy in zip(TENSORS, there, strict=True):
        assert copy.device == device
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy.cpu(), tensor)
    back = staging.download(there)
    for tensor, copy in zip(TENSORS, back.wait(), strict=True):
        assert copy.device == CPU
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    back.release()
    back.release()  # does no harm


def test_what_is_computed_last_is_what_comes_back(staged):
    staging, _ = staged
    weight = torch.eye(128)
    for number in range(12):
        rows = staging.upload(torch.full((128, 128), float(number))).here().requires_grad_()
        out = rows
        for _ in range(8):  # the copy has to wait for these
            out = out @ staging.upload(weight).here()
        out.sum().backward()
        back = staging.download([out, rows.grad])
        value, gradient = back.wait()
        assert not value.requires_grad
        assert torch.equal(value, torch.full((128, 128), float(number)))
        assert torch.equal(gradient, torch.ones(128, 128))
        back.release()


def test_a_download_that_is_kept_is_not_written_over(staged):
    staging, device = staged
    kept = staging.download([torch.full((100,), 1.0, device=device)])
    for number in range(2, 9):
        other = staging.download([torch.full((100,), float(number), device=device)])
        other.wait()
        other.release()
    assert torch.equal(kept.wait()[0], torch.ones(100))


def test_threads_do_not_mix_their_tensors(staged):
    staging, _ = staged

    def work(thread):
        generator = torch.Generator().manual_seed(thread)
        for number in range(60):
            tensor = torch.rand(1 + number % 7, 50 + thread, generator=generator)
            back = staging.download([staging.upload(tensor).here() * 2])
            assert torch.equal(back.wait()[0], tensor * 2)
            back.release()
        return thread

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6), timeout=60)) == list(range(6))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_few_buffers_serve_all_batches(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    staging = CopyStreams(torch.device(device))
    for number in range(200):
        back = staging.download([staging.upload(torch.zeros(2100 + number)).here()])
        back.wait()
        back.release()
    assert staging.sending.made <= 4
    assert staging.receiving.made <= 4
    assert back.tensors[0].is_pinned() == (device == "cuda")


def test_a_buffer_is_not_used_again_before_its_copy_is_done():
    class Event:
        come = False

        def query(self):
            return self.come

    buffers, event = Buffers(pinned=False), Event()
    first = buffers.take(5000)
    buffers.give(first, event)
    second = buffers.take(6000)
    assert second.data_ptr() != first.data_ptr()
    event.come = True
    assert buffers.take(8000).data_ptr() == first.data_ptr()
    assert buffers.made == 2


def test_a_cpu_copies_nothing():
    tensor = torch.zeros(3)
    assert staging_for(CPU).upload(tensor).here() is tensor
    assert not staging_for(CPU).background


@pytest.mark.parametrize("place", [4, 20, 36, 52])
def test_a_cpu_computes_the_same_bits_wherever_its_input_came_to_lie(place):
    generator = torch.Generator().manual_seed(0)
    values, weight = torch.randn(16, 13, generator=generator), torch.randn(8, 13)
    memory = torch.empty(values.nbytes + 64, dtype=torch.uint8)
    came = memory[place : place + values.nbytes].view(torch.float32).view(16, 13)
    here = staging_for(CPU).upload(came.copy_(values)).here()
    product = nn.functional.linear
    assert torch.equal(product(here, weight), product(values, weight))


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)])
def test_the_clock_counts_what_runs(device):
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    clock = BusyClock(device)
    a = torch.randn(300, 300, device=device)
    assert clock.seconds() == 0
    with clock.running():
        for _ in range(20):
            a = a @ a
    if device.type == "cuda":
        torch.cuda.synchronize()
    first = clock.seconds()
    assert first > 0
    assert clock.seconds() == first
    with clock.handling():
        pass
    assert (clock.seconds() > first) == (device.type == "cpu")


def test_what_a_cpu_computes_while_it_handles_counts_once():
    clock = BusyClock(CPU)
    begin = time.perf_counter()
    with clock.handling(), clock.running():
        time.sleep(0.02)
    assert 0.02 <= clock.seconds() <= time.perf_counter() - begin

"""What the meter costs: operations a second of one core, what it adds to one operation, and its memory.

    PYTHONPATH=tests/support python benchmarks/meter_speed.py [--seconds 10] [--operations 400] [--data-dir DIR]

A real meter process between a worker and a ledger that take no time, both in this process, over their
real sockets; 2 cores, client included. Rounds alternate between an operation through the meter (submit
and poll), the same operation sent to the worker, and a 512-byte append + fsync beside the log, so that a
busy machine hurts them alike. The log lies once in memory (what is added besides fsync) and once in
DIR. Throughput is told for a second of the meter's own processor time, load and all. Every operation is
reserved of a budget, billed once and acknowledged: else the figures are void.
Floors: 300/s; 4 / 10 ms added at p50 / p99; 120 MB. Goals: 500/s; 2 / 5 ms; 80 MB.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.http import CONTENT_TYPE, OperationView, Submitted
from gristmill_meter.ports import ExecuteCall
from gristmill_testing.measuring import Timings
from gristmill_testing.meter_process import BASE, Process, served
from gristmill_testing.meter_world import (
    UID,
    forward,
    forward_backward,
    make_submit,
    optim_step,
    sample,
)

MEMORY = Path("/dev/shm")
WARM_UP = 100
SAMPLERS = 8
TRAIN_AHEAD = 16
ROUND = 20
BUDGET_TOKENS = 10**12


class Client:
    """One connection pool to the meter, as the gateway has."""

    def __init__(self, process: Process, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.url = f"http://127.0.0.1:{process.port}{BASE}/operations"
        self.headers = {
            "Authorization": f"Bearer {process.secret}", "X-Gristmill-Attempt": process.attempt
        }  # fmt: skip
        self.number = 0
        self.done = 0

    async def submit(self, number: int | None, operation: ops.Operation) -> Submitted:
        content = msgspec.msgpack.encode(make_submit(number, operation))
        async with self.http.post(self.url, data=content, headers=self.headers) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise SystemExit(f"submit was answered {answer.status}: {body!r}")
            return msgspec.msgpack.decode(body, type=Submitted)

    async def poll(self, stream: str, number: int) -> OperationView:
        url = f"{self.url}/{stream}/{number}?wait_s=15"
        async with self.http.get(url, headers=self.headers) as answer:
            view = msgspec.msgpack.decode(await answer.read(), type=OperationView)
        if view.state != "Completed":
            raise SystemExit(f"operation {stream}/{number} is {view.state}: {view.error}")
        self.done += 1
        return view

    async def train(self, operation: ops.Operation) -> None:
        self.number += 1
        await self.submit(self.number, operation)
        await self.poll("train", self.number)

    async def train_for(self, until: float) -> None:
        """Submits run ahead of polls, as the official SDK lets them."""
        waiting: list[int] = []
        while time.monotonic() < until or waiting:
            while len(waiting) < TRAIN_AHEAD and time.monotonic() < until:
                self.number += 1
                await self.submit(self.number, kind(self.number))
                waiting.append(self.number)
            if waiting:
                await self.poll("train", waiting.pop(0))

    async def sample_for(self, until: float, seed: int) -> None:
        while time.monotonic() < until:
            accepted = await self.submit(None, sample(16, 16, seed=seed))
            await self.poll("log", accepted.number)


def kind(number: int) -> ops.Operation:
    """Three chunks, a forward, and a step."""
    if number % 5 == 0:
        return optim_step()
    return forward(8, number) if number % 5 == 4 else forward_backward(64, number)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field_name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field_name}:")]
    return int(line.split()[1]) * 1024 / 1e6


async def timed(timings: Timings, work: Callable[[], Awaitable[object]]) -> None:
    started = time.perf_counter()
    await work()
    timings.values_ms.append((time.perf_counter() - started) * 1000)


async def latency(process: Process, client: Client, operations: int, where: str) -> list[Timings]:
    """Of a forward of 8 tokens: through the meter, at the bare worker, and of one fsync."""
    through, bare = Timings(f"meter + worker, log {where}", ROUND), Timings("bare worker", ROUND)
    probe = Timings(f"512 B append + fsync {where}", ROUND)
    descriptor = os.open(process.folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    connector = aiohttp.UnixConnector(path=str(process.folder / "w.sock"))
    async with aiohttp.ClientSession(connector=connector) as http:

        async def at_the_worker() -> None:
            call = ExecuteCall(
                index=0, op_id=f"{UID}/log/999999", operation=msgspec.Raw(encoded), replay=False
            )
            async with http.post(
                f"http://worker/v1/sessions/{UID}/execute",
                data=msgspec.msgpack.encode(call),
                headers={"Content-Type": CONTENT_TYPE},
            ) as answer:
                await answer.read()

        def synced() -> None:
            os.write(descriptor, b"x" * 512)
            os.fdatasync(descriptor)

        encoded = msgspec.msgpack.encode(sample(8, 1))
        for _ in range(operations):
            await timed(through, lambda: client.train(forward(8, client.number)))
            await timed(bare, at_the_worker)
            started = time.perf_counter()
            synced()
            probe.values_ms.append((time.perf_counter() - started) * 1000)
    os.close(descriptor)
    return [through, bare, probe]


async def throughput(process: Process, client: Client, seconds: float) -> tuple[float, float]:
    """Operations a second: of wall-clock time, and of the meter's processor time."""
    assert process.child is not None
    done, used, started = client.done, cpu_s(process.child.pid), time.monotonic()
    until = started + seconds
    samplers = [client.sample_for(until, seed) for seed in range(SAMPLERS)]
    await asyncio.gather(client.train_for(until), *samplers)
    operations = client.done - done
    wall_s = time.monotonic() - started
    return operations / wall_s, operations / (cpu_s(process.child.pid) - used)


async def measure(folder: Path, where: str, options: argparse.Namespace) -> None:
    async with served(folder, RETRY_LAST_S="2", HEARTBEAT_S="2", SCAN_S="0.2") as process:
        assert process.child is not None
        process.ledger.budgets.limit = BUDGET_TOKENS
        process.ledger.budgets.share = 100
        pid = process.child.pid
        rest_mb = memory_mb(pid, "VmRSS")
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            client = Client(process, http)
            for _ in range(WARM_UP):
                await client.train(forward(8, client.number))
            timings = await latency(process, client, options.operations, where)
            wall, core = await throughput(process, client, options.seconds)
            await process.acknowledged(client.done)
        through, bare, probe = timings
        for each in timings:
            print(each.row(44))
        added = [through.quantile(share) - bare.quantile(share) for share in (0.5, 0.99)]
        quiet = through.quietest - bare.quietest
        print(f"added, log {where}: p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms, quietest {quiet:.2f} ms "
              f"(two fsyncs: p50 {2 * probe.quantile(0.5):.2f}, p99 {2 * probe.quantile(0.99):.2f})")  # fmt: skip
        print(f"operations/s: {wall:.0f} of wall-clock time, {core:.0f} of one core of the meter")
        trips = process.ledger.calls["take_lease"] + process.ledger.calls["return_lease"]
        print(f"leases: {trips} round trips for {client.done} operations")
        print(f"memory: {rest_mb:.0f} MB at rest, {memory_mb(pid, 'VmRSS'):.0f} MB after, "
              f"{memory_mb(pid, 'VmHWM'):.0f} MB at most")  # fmt: skip
        check(process, client)


def check(process: Process, client: Client) -> None:
    events = process.ledger.events
    if len(events) != client.done or len({event.event_id for event in events}) != client.done:
        raise SystemExit(f"void: {client.done} operations, {len(events)} events")
    if any(event.counts and event.counts.total and not event.lease for event in events):
        raise SystemExit("void: an operation was not reserved")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the throughput run")
    parser.add_argument("--operations", type=int, default=400, help="operations that are timed")
    parser.add_argument("--data-dir", type=Path, help="where the second log lies (a real disk)")
    options = parser.parse_args()
    print(f"{'milliseconds':<44} {'p50':>9} {'p90':>9} {'p99':>9} {'quietest':>9} {'count':>7}")
    places = [("in memory", MEMORY), ("on disk", options.data_dir)]
    for where, place in places:
        with tempfile.TemporaryDirectory(dir=place, prefix="gm-") as folder:
            asyncio.run(measure(Path(folder), where, options))


if __name__ == "__main__":
    main()

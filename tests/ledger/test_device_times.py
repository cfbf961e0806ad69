"""The time of devices is kept for each session, beside its usage and in no bill."""

from pathlib import Path
from typing import Any

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.ids import TenantName
from gristmill_contracts.reconciliation import DeviceTime
from gristmill_ledger.database import Database
from gristmill_ledger.device_times import EVERY_US, record_device_times
from gristmill_testing.ledger import make_event, make_heartbeat, running_ledger
from gristmill_testing.ledger_store import NOW_US, post, register, stored_rows, usage


def beat(
    held_us: int,
    *,
    uid: str = "s-1",
    since_us: int = 1000,
    devices: int = 2,
    busy_us: int = 0,
    tenant: str = "acme",
    attempt: int = 1,
    **changes: Any,
) -> Heartbeat:
    device = DeviceTime(since_us=since_us, held_us=held_us, devices=devices, busy_us=busy_us)
    heartbeat = make_heartbeat(uid, attempt=attempt)
    return msgspec.structs.replace(heartbeat, device=device, tenant=TenantName(tenant), **changes)


def tell(database: Database, *heartbeats: Heartbeat) -> None:
    database.write_now(lambda c: record_device_times(c, heartbeats, NOW_US))


def held(database: Database) -> list[int]:
    return [row["held_us"] for row in stored_rows(database, "device_time")]


def internal(database: Database, **asked: Any) -> dict[str, Any]:
    told: dict[str, Any] = usage(database, include_internal="true", **asked)["internal"]
    return told


def test_a_stretch_is_recorded_when_it_has_grown_by_a_good_part(database: Database) -> None:
    for held_us in (0, 1, EVERY_US - 1, EVERY_US, EVERY_US + 1, 3 * EVERY_US):
        tell(database, beat(held_us))
    assert held(database) == [0, EVERY_US, 3 * EVERY_US]


def test_its_end_is_recorded_to_the_microsecond_and_once(database: Database) -> None:
    tell(database, beat(5))
    for _ in range(2):
        tell(database, beat(9, released=True))
    assert held(database) == [5, 9]
    closed = beat(11)
    closed.view.state = "Closed"
    tell(database, closed, closed)
    assert held(database) == [5, 9, 11]


def test_a_meter_that_tells_nothing_is_no_row(database: Database) -> None:
    tell(database, make_heartbeat("s-1"))
    assert held(database) == []


def test_usage_adds_up_the_stretches_of_each_session(database: Database) -> None:
    tell(database, beat(10, busy_us=4))
    tell(database, beat(30, busy_us=7, released=True))
    tell(database, beat(5, since_us=2000, devices=1, busy_us=5))
    tell(database, beat(6, attempt=2, devices=0, busy_us=1))
    tell(database, beat(100, uid="s-2", tenant="umbrella"))
    assert internal(database, tenant="acme") == {
        "device_time": [
            {"tenant": "acme", "session": "s-1", "held_us": 41, "device_us": 65, "busy_us": 13}
        ],
        "sessions": 1,
        "held_us": 41,
        "device_us": 65,
        "busy_us": 13,
    }
    assert internal(database)["sessions"] == 2
    assert internal(database, session="s-2")["device_us"] == 200
    assert internal(database, since=2000)["held_us"] == 5
    assert internal(database, until=2000)["held_us"] == 136


def test_it_is_told_to_those_who_ask_and_is_in_no_amount(database: Database) -> None:
    register(database)
    post(database, [make_event(1)])
    before = usage(database)
    tell(database, beat(10**9, devices=8, busy_us=10**9))
    assert "internal" not in before
    assert usage(database) == before
    asked = usage(database, include_internal="true")
    assert asked.pop("internal")["device_us"] == 8 * 10**9
    assert asked == before


async def test_a_ledger_records_what_heartbeats_tell(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        for held_us in (7, 8):
            await client.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", [beat(held_us)])
        told = (await client.usage(include_internal="true"))["internal"]
        assert (told["held_us"], told["device_us"]) == (7, 14)
        last = beat(9, released=True)
        await client.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", [last])
        told = (await client.usage(include_internal="true"))["internal"]
        assert told["held_us"] == 9
    assert limits.DEVICE_TIME_EVERY_S * 1e6 == EVERY_US

"""A meter of the release before, byte for byte as it was recorded, at a ledger of this one."""

from pathlib import Path

import msgspec

from gristmill_contracts.http import HeartbeatPage
from gristmill_testing.ledger import running_ledger
from gristmill_testing.recorded_protocol import MESSAGES

ORDER = [
    ("/v1/sessions", "register_session"),
    ("/v1/producers", "register_producer"),
    ("/v1/usage/batches", "usage_batch"),
    ("/v1/checkpoints", "register_checkpoint"),
    ("/v1/heartbeats", "heartbeats"),
]


class Cursor(msgspec.Struct):
    """As that release reads the answer."""

    producer: str
    acked_seq: int


async def test_its_usage_checkpoints_and_heartbeats_are_taken_and_it_reads_the_answers(
    migrated_url: str,
    tmp_path: Path,
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        for _ in range(2):
            for path, name in ORDER:
                status, body = await client.call("POST", path, MESSAGES[name])
                assert status == 200, (path, body)
                if name in ("register_producer", "usage_batch"):
                    assert msgspec.msgpack.decode(body, type=Cursor).acked_seq <= 1
                if name == "heartbeats":
                    assert isinstance(msgspec.msgpack.decode(body, type=dict[str, object]), dict)
        (row,) = (await client.usage(group_by="session"))["rows"]
        assert (row["train"], row["session_name"], row["operations"]) == (5, "run", 1)
        page = await client.ask(HeartbeatPage, "GET", "/v1/heartbeats")
        assert [beat.view.counts.train for beat in page.heartbeats] == [5]

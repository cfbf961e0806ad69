"""Tenants, sessions, checkpoint groups and checkpoints: registering twice is registering once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from gristmill_contracts.errors import ConflictError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import (
    Checkpoint,
    CheckpointPage,
    CreateGroup,
    RegisterCheckpoint,
    TenantAccount,
)  # fmt: skip
from gristmill_contracts.ids import CheckpointId, SessionUid, TenantName
from gristmill_ledger.checkpoints import (
    create_group,
    delete_checkpoint,
    get_checkpoint,
    get_group,
    list_checkpoints,
    register_checkpoint,
)  # fmt: skip
from gristmill_ledger.database import Database
from gristmill_ledger.registry import put_tenant
from gristmill_testing.ledger import START_US
from gristmill_testing.ledger_store import name_session, stored_rows


def account(database: Database, name: str) -> TenantAccount:
    return database.write_now(lambda connection: put_tenant(connection, name))


def registration(number: int, **changes: Any) -> RegisterCheckpoint:
    fields: dict[str, Any] = {
        "id": CheckpointId(f"c-{number}"),
        "tenant": TenantName("acme"),
        "session": SessionUid("s-1"),
        "group": "g",
        "kind": "state",
        "path": f"acme/g/{number}",
        "model": "tiny",
        "rank": 8,
        "alpha": 16,
        "size_bytes": 2**40,
        "manifest_sha256": "ab" * 32,
        "description": "step 5",
        "created_us": START_US + number,
    }
    return RegisterCheckpoint(**(fields | changes))


def save(database: Database, number: int, **changes: Any) -> Checkpoint:
    message = registration(number, **changes)
    return database.write_now(lambda connection: register_checkpoint(connection, message))


def find(database: Database, version: int, group: str = "g") -> Checkpoint:
    return database.read_now(lambda c: get_checkpoint(c, "acme", group, version))


def remove(database: Database, version: int, group: str = "g") -> None:
    database.write_now(lambda c: delete_checkpoint(c, "acme", group, version))


def listed(database: Database, **changes: Any) -> CheckpointPage:
    question: dict[str, Any] = {
        "tenant": "acme", "group": None, "after": None, "limit": 100, "order": "asc",
    }  # fmt: skip
    return database.read_now(lambda c: list_checkpoints(c, **(question | changes)))


def test_account_ids_are_allocated_in_order_and_kept(database: Database) -> None:
    found = [account(database, name).account_id for name in ("acme", "bolt", "acme", "coil")]
    assert found == ["100000000001", "100000000002", "100000000001", "100000000003"]


def test_tenants_made_at_once_get_distinct_account_ids(
    database: Database, another_database: Database
) -> None:
    names = [f"t-{number % 10}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(account, (database, another_database)[index % 2], name)
            for index, name in enumerate(names)
        ]
        found = {(job.result().tenant, job.result().account_id) for job in jobs}
    assert len(found) == len({ids for _name, ids in found}) == 10
    last = max(int(account_id) for _name, account_id in found)
    assert last == 100000000010, "no id was skipped"


@pytest.mark.parametrize(
    "name", ["", "Acme", "-a", "a-", "a_b", "a.b", "a" * 64, "a\0", "\u00e9", "a/b", "a\n"]
)
def test_a_tenant_is_named_by_a_dns_label(database: Database, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a name"):
        account(database, name)
    assert stored_rows(database, "tenant") == []


def test_a_session_registered_again_is_the_same(database: Database) -> None:
    name_session(database, "s-1", "first")
    before = stored_rows(database, "session")
    name_session(database, "s-1", "first")
    assert stored_rows(database, "session") == before


@pytest.mark.parametrize(("name", "tenant"), [("second", "acme"), ("first", "bolt")])
def test_a_session_keeps_its_identity(database: Database, name: str, tenant: str) -> None:
    name_session(database, "s-1", "first")
    with pytest.raises(ConflictError, match="session s-1 is registered with"):
        name_session(database, "s-1", name, tenant=tenant)


def test_versions_are_gapless_in_each_group(database: Database) -> None:
    made = [save(database, n, group=group) for n, group in enumerate(["g", "h", "g", "g", "h"])]
    assert [checkpoint.version for checkpoint in made] == [1, 1, 2, 3, 2]


def test_groups_of_two_tenants_are_two_groups(database: Database) -> None:
    assert save(database, 1).version == save(database, 2, tenant="bolt").version == 1


def test_a_registered_checkpoint_keeps_every_fact(database: Database) -> None:
    made = save(database, 1)
    facts = msgspec.structs.asdict(registration(1))
    assert msgspec.structs.asdict(made) == {**facts, "version": 1, "deleted": False}
    assert find(database, 1) == made


def test_the_same_checkpoint_again_keeps_its_version(database: Database) -> None:
    first = save(database, 1)
    save(database, 2)
    assert save(database, 1) == first
    assert [c.version for c in listed(database).checkpoints] == [1, 2]


@pytest.mark.parametrize(
    "change",
    [{"group": "h"}, {"tenant": "bolt"}, {"path": "x"}, {"kind": "weights"}, {"rank": 4},
     {"manifest_sha256": "cd" * 32}, {"created_us": 1}],
    ids=str,
)  # fmt: skip
def test_other_facts_under_a_known_id_conflict(database: Database, change: dict[str, Any]) -> None:
    save(database, 1)
    with pytest.raises(ConflictError, match=f"registered with {next(iter(change))}"):
        save(database, 1, **change)
    assert len(stored_rows(database, "checkpoint")) == 1


def test_checkpoints_saved_at_once_get_each_version_once(
    database: Database, another_database: Database
) -> None:
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(save, (database, another_database)[copy], number)
            for number in range(20)
            for copy in range(2)
        ]
        made = {(job.result().id, job.result().version) for job in jobs}
    assert sorted(version for _id, version in made) == list(range(1, 21))


def test_the_first_checkpoint_makes_its_group(database: Database) -> None:
    with pytest.raises(NotFoundError, match="checkpoint group 'g' of acme"):
        database.read_now(lambda c: get_group(c, "acme", "g"))
    save(database, 1)
    assert database.read_now(lambda c: get_group(c, "acme", "g")).description == ""


def test_a_group_is_made_once(database: Database) -> None:
    request = CreateGroup(tenant=TenantName("acme"), name="g", description="for evaluation")
    made = database.write_now(lambda c: create_group(c, request))
    assert database.read_now(lambda c: get_group(c, "acme", "g")) == made
    with pytest.raises(ConflictError, match="'g' of acme exists"):
        database.write_now(lambda c: create_group(c, request))
    save(database, 1)
    assert database.read_now(lambda c: get_group(c, "acme", "g")) == made


def test_a_deleted_checkpoint_is_gone_but_its_facts_and_number_stay(database: Database) -> None:
    save(database, 1)
    save(database, 2)
    remove(database, 2)
    with pytest.raises(NotFoundError, match="acme/g/2"):
        find(database, 2)
    with pytest.raises(NotFoundError, match="acme/g/2"):
        remove(database, 2)
    assert [c.version for c in listed(database).checkpoints] == [1]
    assert save(database, 3).version == 3
    assert len(stored_rows(database, "checkpoint")) == 3


def test_a_replayed_save_does_not_bring_a_deleted_checkpoint_back(database: Database) -> None:
    save(database, 1)
    remove(database, 1)
    assert (save(database, 1).version, save(database, 1).deleted) == (1, True)
    assert listed(database).checkpoints == []


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_in_either_order_hold_each_checkpoint_once(
    database: Database, order: str, limit: int
) -> None:
    """Times of creation repeat, and do not come in the order of registration."""
    for number in (3, 1, 2, 5, 4, 6):
        save(database, number, created_us=START_US + number // 2)
    remove(database, 1)
    found: list[str] = []
    after: str | None = None
    while True:
        page = listed(database, limit=limit, order=order, after=after)
        assert len(page.checkpoints) <= limit
        found += [checkpoint.id for checkpoint in page.checkpoints]
        after = page.next_after
        if after is None:
            break
    ascending = ["c-1", "c-2", "c-4", "c-5", "c-6"]
    assert found == (ascending if order == "asc" else ascending[::-1])


def test_a_list_may_be_of_one_group(database: Database) -> None:
    save(database, 1)
    save(database, 2, group="h")
    assert [c.id for c in listed(database, group="h").checkpoints] == ["c-2"]
    assert listed(database, tenant="bolt").checkpoints == []


@pytest.mark.parametrize("after", ["!", "AAAA", "a" * 9000, "kgGhAA=="])
def test_a_cursor_of_ones_own_making_is_refused(database: Database, after: str) -> None:
    with pytest.raises(InvalidRequestError, match="after"):
        listed(database, after=after)

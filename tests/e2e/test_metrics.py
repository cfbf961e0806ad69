"""What the processes of a running Gristmill tell Prometheus is what the contract lists: names, kinds, labels."""

import contextlib
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gristmill_contracts import metrics as names
from gristmill_contracts.metric_shapes import SHAPES, Part, Shape
from gristmill_testing.bare_worker import UnixConnection
from gristmill_testing.instance import RunningGristmill
from gristmill_testing.raw_wire import (
    Clients,
    create_session,
    datum,
    forward_backward,
    sample,
    wait_until,
)

pytestmark = pytest.mark.e2e

PARTS: tuple[Part, ...] = ("gateway", "ledger", "meter", "worker")
SAMPLED = {
    names.GATEWAY_REQUESTS, names.GATEWAY_REQUEST_SECONDS, names.METER_TOKENS, names.METER_OPERATIONS,
    names.LEDGER_EVENTS, names.LEDGER_COMMIT_SECONDS, names.RATED_COST, names.RESERVATIONS_EXPIRED,
    names.BUDGET_LIMIT, names.BUDGET_POSTED, names.BUDGET_RESERVED,
    names.WORKER_OPERATIONS, names.WORKER_TOKENS, names.WORKER_OPERATION_SECONDS,
}  # fmt: skip
"""What one step and one sample, and a budget, must have given a value."""


def scrape(instance: RunningGristmill, part: Part) -> str:
    if part == "worker":
        with contextlib.closing(UnixConnection(instance.worker_socket)) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
    row = next(each for each in instance.processes() if each["part"] == part)
    with urllib.request.urlopen(f"http://127.0.0.1:{row['port']}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def read(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """Name -> (kind, the sets of labels that its samples have, each sorted)."""
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):  # When a series began: the library's own.
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {tuple(sorted(set(each.labels) - {"le"})) for each in family.samples}
        found[name] = (family.type, labels)
    return found


def differences(part: Part, text: str) -> dict[str, object]:
    """What a scrape has and the list has not, and the other way round."""
    found = read(text)
    wrong: dict[str, object] = {}
    for name in found.keys() | SHAPES[part].keys():
        kind, labels = found.get(name, ("missing", set()))
        listed = SHAPES[part].get(name, Shape("gauge", ("not", "listed")))
        if kind != listed.kind or labels - {tuple(sorted(listed.labels))}:
            wrong[name] = (kind, labels)
    return wrong


def sampled(instance: RunningGristmill) -> set[str]:
    return {
        name
        for part in PARTS
        for name, (_, labels) in read(scrape(instance, part)).items()
        if labels
    }


def test_every_process_tells_what_is_listed_for_it(
    instance: RunningGristmill, clients: Clients
) -> None:
    nobody = ("--scope-type", "project", "--scope", "of-nobody")
    instance.cli("budget", "set", "metrics", "1000", *nobody)
    session = create_session(clients, instance.model)
    try:
        assert session.run(forward_backward(datum([5, 6, 7])))["status"] == "Completed"
        assert session.run_sampling(sample([5, 6, 7]))["status"] == "Completed"
        wait_until(lambda: sampled(instance) >= SAMPLED, "every process to have counted", 120)
        found = {part: differences(part, scrape(instance, part)) for part in PARTS}
        assert found == {part: {} for part in PARTS}
    finally:
        session.stop()
        instance.cli("budget", "end", "metrics")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("# TYPE gristmill_odd gauge\ngristmill_odd 1\n", "gristmill_odd"),
        ("# TYPE gristmill_worker_queued counter\n", names.WORKER_QUEUED),
        (
            f'# TYPE {names.WORKER_QUEUED} gauge\n{names.WORKER_QUEUED}{{session="s"}} 1\n',
            names.WORKER_QUEUED,
        ),
        ("", names.WORKER_QUEUED),
    ],
    ids=["not listed", "another kind", "another label", "missing"],
)
def test_a_difference_would_be_seen(text: str, name: str) -> None:
    assert name in differences("worker", text)

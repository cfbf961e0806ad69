"""Folders, ports, sockets and the lock of one data folder."""

import socket
import stat
from pathlib import Path

import pytest

from gristmill_cli.errors import CommandError, NotRunningError
from gristmill_cli.local.instance import (
    Instance,
    announce,
    find_instance,
    require_instance,
    take_lock,
)
from gristmill_cli.local.layout import (
    GroupKey,
    Layout,
    find_data_dir,
    make_folders,
    make_group_folders,
    write_private,
)
from gristmill_cli.local.ports import LOOPBACK, free_port, is_free, load_addresses
from gristmill_cli.local.programs import (
    WorkerModel,
    child_environment,
    gateway_program,
    ledger_program,
    meter_program,
    worker_program,
)
from gristmill_cli.local.up import UpOptions, choose_port

KEY = GroupKey("acme", "tiny")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout(tmp_path / "data")
    make_folders(found)
    return found


def test_only_the_owner_may_look_into_the_data_folder(layout: Layout) -> None:
    make_group_folders(layout, KEY)
    for path in (layout.root, layout.secrets, layout.logs, layout.meter(KEY)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert stat.S_IMODE(layout.operation_key.stat().st_mode) == 0o600
    key = layout.operation_key.read_bytes()
    make_folders(layout)
    assert layout.operation_key.read_bytes() == key
    assert len(key) == 32


def test_groups_of_different_tenants_never_share_a_folder(layout: Layout) -> None:
    assert layout.group(GroupKey("a-b", "c")) != layout.group(GroupKey("a", "b-c"))
    assert str(GroupKey("a-b", "c")) != str(GroupKey("a", "b-c"))


def test_the_data_folder_comes_from_option_variable_or_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GRISTMILL_DATA_DIR", raising=False)
    assert find_data_dir(None) == tmp_path / ".gristmill"
    monkeypatch.setenv("GRISTMILL_DATA_DIR", "~/other")
    assert find_data_dir(None) == tmp_path / "other"
    assert find_data_dir(Path("relative")) == Path.cwd() / "relative"


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


# --- ports ---------------------------------------------------------------------------------------


def test_ports_are_chosen_once_and_kept(layout: Layout) -> None:
    first = load_addresses(layout)
    ports = [first.port("ledger"), first.port("meter.acme.tiny")]
    again = load_addresses(layout)
    again.forget_taken()
    assert [again.port("ledger"), again.port("meter.acme.tiny")] == ports


def test_a_port_that_somebody_took_is_chosen_again(layout: Layout) -> None:
    addresses = load_addresses(layout)
    port = addresses.port("ledger")
    with socket.socket() as other:
        other.bind((LOOPBACK, port))
        other.listen()
        addresses.forget_taken()
        assert addresses.port("ledger") != port


def test_a_deep_data_folder_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    layout = Layout(tmp_path / ("deep" * 20))
    make_folders(layout)
    path = load_addresses(layout).socket(KEY)
    assert len(str(path)) < 100
    assert path.parent.is_dir()
    assert load_addresses(layout).socket(KEY) == path
    assert load_addresses(layout).socket(GroupKey("other", "tiny")) != path
    path.parent.rmdir()
    renewed = load_addresses(layout).socket(KEY)
    assert renewed.parent.is_dir()
    renewed.parent.rmdir()


def test_a_short_data_folder_keeps_its_socket(layout: Layout) -> None:
    assert load_addresses(Layout(Path("/d"))).socket(KEY) == Path("/d/run/worker.acme.tiny.sock")


def test_a_damaged_record_of_ports_is_named(layout: Layout) -> None:
    layout.ports.write_text("{")
    with pytest.raises(CommandError, match=r"ports\.json cannot be read"):
        load_addresses(layout)


def test_the_gateways_port_is_the_asked_one_the_recorded_one_or_any(layout: Layout) -> None:
    addresses = load_addresses(layout)
    asked = free_port()
    assert choose_port(addresses, UpOptions(port=asked)) == asked
    addresses.record("gateway", free_port())
    assert choose_port(addresses, UpOptions()) == addresses.port("gateway")
    assert is_free(LOOPBACK, choose_port(addresses, UpOptions(port=0)))
    with socket.socket() as other:
        other.bind((LOOPBACK, asked))
        other.listen()
        with pytest.raises(CommandError, match="is taken"):
            choose_port(addresses, UpOptions(port=asked))


# --- the instance --------------------------------------------------------------------------------


def make_instance(pid: int) -> Instance:
    return Instance(pid=pid, url="http://u", ledger_url="http://l", started_us=1)


def test_a_data_folder_has_one_instance(layout: Layout) -> None:
    with take_lock(layout), pytest.raises(CommandError, match="already running"):
        take_lock(layout)
    take_lock(layout).close()


def test_an_instance_is_found_while_its_lock_is_held(layout: Layout) -> None:
    import os

    with take_lock(layout):
        assert find_instance(layout) is None
        announce(layout, make_instance(os.getpid()))
        assert find_instance(layout) == make_instance(os.getpid())
    assert find_instance(layout) is None
    with pytest.raises(NotRunningError, match="gristmill up --data-dir"):
        require_instance(layout)


def test_what_an_earlier_instance_left_behind_is_not_believed(layout: Layout) -> None:
    announce(layout, make_instance(1))
    with take_lock(layout):
        assert find_instance(layout) is None


# --- programs ------------------------------------------------------------------------------------


def test_every_setting_of_a_program_is_known_to_its_part(layout: Layout) -> None:
    from gristmill_gateway.settings import GatewaySettings
    from gristmill_ledger.settings import LedgerSettings
    from gristmill_meter.settings import MeterSettings
    from gristmill_worker.settings import WorkerSettings

    model = WorkerModel(name="tiny", folder="/m", dtype="float32", threads=1)
    socket_path = Path("/s/w.sock")
    for program, settings in (
        (ledger_program(layout, 1), LedgerSettings),
        (gateway_program(layout, LOOPBACK, 2, "http://l"), GatewaySettings),
        (meter_program(layout, KEY, 3, socket_path, "http://l"), MeterSettings),
        (worker_program(layout, KEY, socket_path, model), WorkerSettings),
    ):
        prefix = f"GRISTMILL_{program.part.upper()}_"
        names = {name.removeprefix(prefix).lower() for name, _ in program.environment}
        assert names <= set(settings.model_fields), program.part
        built = settings(
            **{name.removeprefix(prefix).lower(): v for name, v in program.environment}
        )
        assert built


def test_a_child_inherits_settings_of_its_own_part_that_were_left_open(layout: Layout) -> None:
    program = meter_program(layout, KEY, 3, Path("/s/w.sock"), "http://l")
    found = child_environment(
        program,
        {
            "PATH": "/bin",
            "GRISTMILL_DATA_DIR": "/d",
            "GRISTMILL_METER_GAP_TIMEOUT_S": "1",
            "GRISTMILL_METER_HEARTBEAT_S": "9",
            "GRISTMILL_METER_PORT": "1",
            "GRISTMILL_WORKER_THREADS": "1",
        },
    )
    assert found["PATH"] == "/bin"
    assert found["GRISTMILL_METER_GAP_TIMEOUT_S"] == "1"
    assert found["GRISTMILL_METER_HEARTBEAT_S"] == "9"
    assert found["GRISTMILL_METER_PORT"] == "3"
    assert "GRISTMILL_WORKER_THREADS" not in found
    assert "GRISTMILL_DATA_DIR" not in found

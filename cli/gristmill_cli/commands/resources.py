"""`gristmill apply`, `get`, `describe` and `delete`."""

import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from gristmill_cli.cluster import views
from gristmill_cli.cluster.gateway import Gateway, open_gateway
from gristmill_cli.commands.models import show_hub_models, show_models
from gristmill_cli.describe import describe_lines
from gristmill_cli.errors import CommandError
from gristmill_cli.keys import ensure_tenant
from gristmill_cli.local.instance import find_instance, require_instance
from gristmill_cli.local.layout import Layout, make_folders
from gristmill_cli.manifests import apply as apply_one
from gristmill_cli.manifests import as_manifest, label, read_manifests
from gristmill_cli.models import apply_model
from gristmill_cli.options import (
    DEFAULT_TENANT,
    DataDir,
    Endpoint,
    OutputOption,
    find_layout,
    open_store,
)
from gristmill_cli.options import Tenant as TenantOption
from gristmill_cli.output import Output, print_data, print_table, reports_errors, say
from gristmill_cli.times import age
from gristmill_contracts import conditions
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.resources import Resource
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_sessions.identity import session_name
from gristmill_sessions.port import ResourceStore

POLL_S: Final = 0.1
R = TypeVar("R", bound=Resource)


class Noun(StrEnum):
    """What can be listed; singular and plural both do."""

    SESSIONS = "sessions"
    SESSION = "session"
    MODELS = "models"
    MODEL = "model"
    TENANTS = "tenants"
    TENANT = "tenant"


class SessionNoun(StrEnum):
    """What can be described and deleted."""

    SESSION = "session"
    SESSIONS = "sessions"


@reports_errors
def apply(
    file: Annotated[
        str, typer.Option("--filename", "-f", help="Manifests to apply; - reads standard input.")
    ],
    data_dir: DataDir = None,
    tenant: TenantOption = DEFAULT_TENANT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create or change what the manifests say: TrainingSession, Tenant, BaseModel and RateCard."""
    layout = find_layout(data_dir)
    wanted = read_manifests(_text_of(file), "standard input" if file == "-" else file, tenant)
    store = open_store(layout)
    outcomes = []
    for resource in wanted:
        if isinstance(resource, TrainingSession):
            ensure_tenant(store, resource.metadata.namespace)
        if isinstance(resource, BaseModelResource):
            make_folders(layout)
            outcome = apply_model(store, layout, resource, say)
        else:
            outcome = apply_one(store, resource)
        outcomes.append({"resource": label(resource), "outcome": outcome})
        if output is Output.TABLE:
            typer.echo(f"{label(resource)} {outcome}")
    if output is not Output.TABLE:
        print_data(outcomes, output)
    _hint_if_down(layout)


def _text_of(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error


def _hint_if_down(layout: Layout) -> None:
    if find_instance(layout) is None:
        say(
            f"gristmill is not running on {layout.root}: it takes effect at the next `gristmill up`"
        )


@reports_errors
def get(
    noun: Annotated[Noun, typer.Argument(help="What to list.")],
    name: Annotated[str, typer.Argument(help="Only this one.")] = "",
    *,
    data_dir: DataDir = None,
    tenant: TenantOption = DEFAULT_TENANT,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", "-A", help="Sessions of all tenants.")
    ] = False,
    endpoint: Endpoint = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """List sessions, models or tenants. Of a cluster: the sessions of the access key's tenant, and models."""
    if endpoint:
        _get_of_cluster(open_gateway(endpoint), noun, name, output)
        return
    store = open_store(find_layout(data_dir))
    match noun:
        case Noun.SESSION | Noun.SESSIONS:
            sessions = store.list(TrainingSession, None if all_tenants else tenant)
            chosen = [find_session(store, tenant, name)] if name else sessions
            _show(chosen, name, output, _session_table)
        case Noun.MODEL | Noun.MODELS:
            show_models(_named(store.list(BaseModelResource), name), output)
        case Noun.TENANT | Noun.TENANTS:
            _show(_named(store.list(Tenant), name), name, output, _tenant_table)


def _get_of_cluster(gateway: Gateway, noun: Noun, name: str, output: Output) -> None:
    match noun:
        case Noun.SESSION | Noun.SESSIONS:
            found = [gateway.session(name)] if name else gateway.sessions()
            if output is not Output.TABLE:
                print_data(found[0] if name else found, output)
                return
            print_table(
                views.SESSION_COLUMNS, views.session_rows(found), numbers=views.SESSION_NUMBERS
            )
        case Noun.MODEL | Noun.MODELS:
            show_hub_models([gateway.model(name)] if name else gateway.models(), output)
        case Noun.TENANT | Noun.TENANTS:
            raise CommandError(
                "an access key sees its own tenant alone; `kubectl get tenants` lists those of a cluster"
            )


def _named(resources: list[R], name: str) -> list[R]:
    """All, or the one of that name. Raises CommandError."""
    if not name:
        return resources
    found = [each for each in resources if each.metadata.name == name]
    if not found:
        known = ", ".join(each.metadata.name for each in resources) or "none"
        raise CommandError(f"there is no {name!r}; known: {known}")
    return found


def _show(
    resources: Sequence[R], name: str, output: Output, table: Callable[[Sequence[R]], None]
) -> None:
    if output is Output.TABLE:
        table(resources)
        return
    manifests = [as_manifest(each) for each in resources]
    print_data(manifests[0] if name else manifests, output)


def _session_table(sessions: Sequence[TrainingSession]) -> None:
    print_table(
        ("TENANT", "NAME", "STATE", "MODEL", "RANK", "TOKENS", "RESTARTS", "REASON", "AGE"),
        [
            (
                each.metadata.namespace,
                session_name(each),
                each.status.state,
                each.spec.base_model_ref.name,
                each.spec.lora.rank,
                sum(each.status.usage.model_dump().values()),
                each.status.restarts,
                reason_of(each),
                age(each.metadata.creation_time_us),
            )
            for each in sessions
        ],
        numbers=("RANK", "TOKENS", "RESTARTS"),
    )


def reason_of(session: TrainingSession) -> str:
    """The word that explains the state best; empty where the state says it all."""
    for type_ in (
        conditions.DELETED,
        conditions.FAILED,
        conditions.EXPIRED,
        conditions.BLOCKED,
        conditions.ACCEPTED,
        conditions.SERVING,
        conditions.PODS_READY,
    ):
        found = conditions.find(session.status.conditions, type_)
        bad = (
            "False"
            if type_ not in (conditions.FAILED, conditions.EXPIRED, conditions.BLOCKED)
            else "True"
        )
        if found is not None and found.status == bad and found.reason != "Ended":
            return found.reason
    return ""


def _tenant_table(tenants: Sequence[Tenant]) -> None:
    print_table(
        ("NAME", "ACCOUNT", "STATE", "AGE"),
        [
            (
                each.metadata.name,
                each.status.account_id,
                "suspended" if each.spec.suspended else "active",
                age(each.metadata.creation_time_us),
            )
            for each in tenants
        ],
    )


def find_session(store: ResourceStore, tenant: str, name: str) -> TrainingSession:
    """By the resource's name, else by its display name. Raises CommandError."""
    try:
        return store.get(TrainingSession, tenant, name)
    except NotFoundError:
        pass
    for session in store.list(TrainingSession, tenant):
        if session_name(session) == name:
            return session
    raise CommandError(
        f"there is no session {name!r} of tenant {tenant!r}; `gristmill get sessions --all-tenants` lists all"
    )


@reports_errors
def describe(
    noun: Annotated[SessionNoun, typer.Argument(help="What to describe.")],
    name: Annotated[str, typer.Argument()],
    *,
    data_dir: DataDir = None,
    tenant: TenantOption = DEFAULT_TENANT,
    endpoint: Endpoint = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Tell all about one session: spec, state, conditions, usage."""
    del noun
    if endpoint:
        detail = open_gateway(endpoint).session(name)
        if output is Output.TABLE:
            typer.echo("\n".join(views.session_lines(detail)))
        else:
            print_data(detail, output)
        return
    session = find_session(open_store(find_layout(data_dir)), tenant, name)
    if output is Output.TABLE:
        typer.echo("\n".join(describe_lines(session)))
    else:
        print_data(as_manifest(session), output)


@reports_errors
def delete(
    noun: Annotated[SessionNoun, typer.Argument(help="What to delete.")],
    name: Annotated[str, typer.Argument()],
    *,
    data_dir: DataDir = None,
    tenant: TenantOption = DEFAULT_TENANT,
    wait: Annotated[bool, typer.Option(help="Wait until it is gone.")] = True,
    timeout_s: Annotated[float, typer.Option(min=0, help="How long to wait.")] = 120.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a session. Its usage and its checkpoints stay in the ledger."""
    del noun
    layout = find_layout(data_dir)
    store = open_store(layout)
    session = find_session(store, tenant, name)
    meta = session.metadata
    if meta.finalizers:
        require_instance(layout)
    store.delete(TrainingSession, meta.namespace, meta.name)
    if wait and not _is_gone(store, session, timeout_s):
        raise CommandError(
            f"{label(session)} is not gone after {timeout_s:g} s; `gristmill describe session {name}` says "
            "what is left"
        )
    outcome = "deleted" if wait else "is being deleted"
    if output is Output.TABLE:
        typer.echo(f"{label(session)} {outcome}")
    else:
        print_data({"resource": label(session), "outcome": outcome}, output)


def _is_gone(store: ResourceStore, session: TrainingSession, timeout_s: float) -> bool:
    meta = session.metadata
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if store.get(TrainingSession, meta.namespace, meta.name).metadata.uid != meta.uid:
                return True
        except NotFoundError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)

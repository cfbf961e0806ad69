"""Eyes, hands and reconcilers of the operator in the test's own process, on a real API server.

They act with the shipped ServiceAccount's rights. Nobody watches: `look` reads everything anew.
"""

import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import yaml

from gristmill_contracts.budgets import BudgetView, PutBudget, ScopeType
from gristmill_contracts.cluster_http import Directive, UsageGap
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import RegisterSession, TenantAccount
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.price_book import PriceBook
from gristmill_contracts.session import TrainingSession, TrainingSessionStatus
from gristmill_operator.apply import ClusterHands
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.cache import ObjectCache
from gristmill_operator.client import ApiClient
from gristmill_operator.cluster import CachedCluster
from gristmill_operator.codec import session_from, status_patch
from gristmill_operator.expectations import Expectations
from gristmill_operator.kinds import SESSIONS, WATCHED
from gristmill_operator.memory import Memory
from gristmill_operator.models import ModelReconciler
from gristmill_operator.observe import ClusterObserver
from gristmill_operator.ratecards import CardReconciler
from gristmill_operator.seams import Json
from gristmill_operator.settings import OperatorSettings
from gristmill_operator.tenants import TenantReconciler
from gristmill_sessions.observed import Observed
from gristmill_testing.budget_views import view_of
from gristmill_testing.cluster import Cluster
from gristmill_testing.cluster_objects import CLUSTER_KEY, operator_settings
from gristmill_testing.operator_world import SYSTEM


@dataclass(slots=True)
class BookingLedger:
    """Takes everything, remembers it, and can be told to refuse."""

    tenants: list[str] = field(default_factory=list)
    sessions: list[RegisterSession] = field(default_factory=list)
    books: list[PriceBook] = field(default_factory=list)
    directives: list[tuple[SessionUid, Directive]] = field(default_factory=list)
    gaps: list[tuple[SessionUid, UsageGap]] = field(default_factory=list)
    refusal: GristmillError | None = None
    budgets: dict[tuple[str, str], PutBudget] = field(default_factory=dict)
    posted: int = 0
    """What is used of each budget."""

    async def put_tenant(self, tenant: str) -> TenantAccount:
        self._check()
        self.tenants.append(tenant)
        return TenantAccount(tenant=TenantName(tenant), account_id="100000000001")

    async def register_session(self, session: RegisterSession) -> None:
        self._check()
        self.sessions.append(session)

    async def put_price_book(self, book: PriceBook) -> None:
        self._check()
        self.books.append(book)

    async def put_budget(self, tenant: str, name: str, budget: PutBudget) -> BudgetView:
        self._check()
        self.budgets[tenant, name] = budget
        return self._view(tenant, name)

    async def list_budgets(
        self, tenant: str, scope_type: ScopeType, scope: str
    ) -> list[BudgetView]:
        self._check()
        return [
            self._view(*key)
            for key, put in self.budgets.items()
            if (key[0], put.scope_type, put.scope) == (tenant, scope_type, scope)
        ]

    async def end_budget(self, tenant: str, name: str) -> None:
        self._check()
        del self.budgets[tenant, name]

    def _view(self, tenant: str, name: str) -> BudgetView:
        return view_of(tenant, name, self.budgets[tenant, name], self.posted)

    async def put_directive(self, uid: SessionUid, directive: Directive) -> None:
        self._check()
        self.directives.append((uid, directive))

    async def record_gap(self, uid: SessionUid, gap: UsageGap) -> None:
        self._check()
        self.gaps.append((uid, gap))

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal


@dataclass(slots=True)
class HeardRecorder:
    """Events as (reason, note)."""

    heard: list[tuple[str, str]] = field(default_factory=list)

    def record(
        self,
        regarding: Json,
        reason: str,
        note: str,
        *,
        warning: bool = False,
        action: str = "Reconcile",
        related: Json | None = None,
    ) -> None:
        self.heard.append((reason, note))

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.heard]


@dataclass(slots=True)
class NoHeartbeats:
    ledger_answers: bool = True
    caught_up: bool = True

    def newest(self, uid: SessionUid) -> None:
        return None

    def age_s(self, uid: SessionUid) -> None:
        return None


@dataclass(slots=True, kw_only=True)
class Bench:
    cluster: Cluster
    client: ApiClient
    cache: ObjectCache
    written: CachedCluster
    settings: OperatorSettings
    now_us: int = 1_790_000_000_000_000
    ledger: BookingLedger = field(default_factory=BookingLedger)
    recorder: HeardRecorder = field(default_factory=HeardRecorder)
    memory: Memory = field(default_factory=Memory)

    async def look(self) -> None:
        """What the watches would have told by now."""
        for kind in WATCHED:
            listed = await self.client.list(kind, selector=kind.selector)
            present = {each["metadata"]["uid"] for each in listed}
            for body in self.cache.list(kind):
                meta = body["metadata"]
                if meta["uid"] not in present:
                    place = meta.get("namespace", ""), meta["name"]
                    self.cache.remove(kind, *place, meta["uid"])
            for body in listed:
                self.cache.put(kind, body)

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "cluster": self.written,
            "cache": self.cache,
            "ledger": self.ledger,
            "key": CLUSTER_KEY,
            "settings": self.settings,
            "clock": lambda: self.now_us,
        }

    @property
    def hands(self) -> ClusterHands:
        return ClusterHands(memory=self.memory, **self._common)

    @property
    def eyes(self) -> ClusterObserver:
        return ClusterObserver(
            cache=self.cache,
            heartbeats=NoHeartbeats(),
            settings=self.settings,
            memory=self.memory,
        )

    async def tenant(self, name: str) -> float | None:
        await self.look()
        return await TenantReconciler(recorder=self.recorder, **self._common).reconcile(name)

    async def model(self, name: str) -> float | None:
        await self.look()
        return await ModelReconciler(recorder=self.recorder, **self._common).reconcile(name)

    async def card(self, name: str) -> float | None:
        await self.look()
        return await CardReconciler(recorder=self.recorder, **self._common).reconcile(name)

    # --- sessions

    async def session(self, namespace: str, name: str) -> TrainingSession:
        """As the API server holds it now."""
        return session_from(await self.client.get(SESSIONS, namespace, name))

    async def set_status(self, session: TrainingSession, **changes: Any) -> TrainingSession:
        """Play the loop: write a status."""
        meta = session.metadata
        body = await self.client.get(SESSIONS, meta.namespace, meta.name)
        status: TrainingSessionStatus = session_from(body).status.model_copy(update=changes)
        patch = status_patch(body, status)
        if patch is not None:
            await self.client.merge_patch(
                SESSIONS, meta.namespace, meta.name, patch, subresource="status"
            )
        return await self.session(meta.namespace, meta.name)

    def observe(self, session: TrainingSession) -> Observed:
        return self.eyes.observe(session, error="", now_us=self.now_us)


@asynccontextmanager
async def operator_bench(cluster: Cluster, **settings: Any) -> AsyncIterator[Bench]:
    """`install_chart` before: it brings the rights."""
    token = cluster.kubectl(
        "create", "token", "gristmill-operator", f"--namespace={SYSTEM}", "--duration=1h"
    ).strip()
    server, tls = _api_server(cluster)
    http = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls), headers={"Authorization": f"Bearer {token}"}
    )
    async with http:
        client = ApiClient(http=http, server=server, bucket=TokenBucket(rate=1000, burst=1000))
        cache = ObjectCache()
        written = CachedCluster(client=client, cache=cache, expectations=Expectations(cache=cache))
        yield Bench(
            cluster=cluster,
            client=client,
            cache=cache,
            written=written,
            settings=operator_settings(system_namespace=SYSTEM, **settings),
        )


def clear_away(cluster: Cluster, tenant: str, namespace: str) -> None:
    """Tenant, namespace and sessions, whose finalizers nobody else would remove. Waits for nothing."""
    for session in cluster.objects("trainingsessions", namespace):
        cluster.try_kubectl(
            "patch", "trainingsession", session["metadata"]["name"], f"--namespace={namespace}",
            "--type=merge", '--patch={"metadata":{"finalizers":null}}',
        )  # fmt: skip
    cluster.try_kubectl("delete", "tenant", tenant, "--ignore-not-found", "--wait=false")
    cluster.try_kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=false")


def _api_server(cluster: Cluster) -> tuple[str, ssl.SSLContext]:
    """Its address, and trust in its certificate; not the administrator's identity."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    entry = config["clusters"][0]["cluster"]
    authority = entry.get("certificate-authority-data")
    text = (
        base64.b64decode(authority).decode()
        if authority
        else (cluster.kubeconfig.parent / entry["certificate-authority"]).read_text()
    )
    return entry["server"], ssl.create_default_context(cadata=text)

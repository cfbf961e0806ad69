"""The client of the API server on the wire: what it sends, what it tries again, when it does not write."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from gristmill_contracts.errors import InvalidRequestError, NotFoundError, UnavailableError
from gristmill_operator.bucket import TokenBucket
from gristmill_operator.client import ApiClient
from gristmill_operator.cluster_key import ensure_key
from gristmill_operator.credentials import Access, Token, find_access
from gristmill_operator.kinds import NETWORK_POLICIES, NODES, PODS, PRIMARY, SESSIONS
from gristmill_operator.problems import NotLeaderError, ThrottledError
from gristmill_operator.startup import NotFitError, check
from gristmill_testing.small_api import SmallApi


@dataclass
class Server:
    """Answers as it was told, and keeps what it was asked."""

    answers: list[web.Response] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""
    hold: asyncio.Event | None = None
    by_path: dict[str, Any] = field(default_factory=dict)
    """What a path that begins so is answered, where `answers` has nothing."""

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append((request.method, request.path_qs, dict(request.headers), body))
        if self.hold is not None:
            await self.hold.wait()
        if self.answers:
            return self.answers.pop(0)
        fits = (body for path, body in self.by_path.items() if request.path.startswith(path))
        return web.json_response(next(fits, {"metadata": {}}))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    if made.hold is not None:
        made.hold.set()
    await runner.cleanup()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[ApiClient]:
    async with aiohttp.ClientSession() as http:
        yield ApiClient(http=http, server=server.url, bucket=TokenBucket(rate=1e6, burst=1000))


def status(code: int, reason: str, message: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "reason": reason, "message": message, "code": code}
    return web.json_response(body, status=code, headers=headers)


async def test_an_apply_names_its_manager_and_kind(server: Server, client: ApiClient) -> None:
    await client.apply(NETWORK_POLICIES, {"metadata": {"namespace": "gm-a", "name": "n"}})
    ((method, path, headers, body),) = server.asked
    assert method == "PATCH"
    assert path == (
        "/apis/networking.k8s.io/v1/namespaces/gm-a/networkpolicies/n"
        "?fieldManager=gristmill-operator&force=true"
    )
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert (body["apiVersion"], body["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")


async def test_a_delete_is_of_one_object_and_no_other_of_its_name(
    server: Server, client: ApiClient
) -> None:
    await client.delete(PODS, "gm-a", "p", uid="u1", grace_s=0)
    ((method, path, _, body),) = server.asked
    assert (method, path) == ("DELETE", "/api/v1/namespaces/gm-a/pods/p")
    assert body["preconditions"] == {"uid": "u1"}
    assert body["gracePeriodSeconds"] == 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((404, "NotFound", "not found"), id="gone"),
        pytest.param(
            (409, "Conflict", "the UID in the precondition (a) does not match"), id="another"
        ),
    ],
)
async def test_deleting_what_is_gone_is_done(
    server: Server, client: ApiClient, answer: tuple[int, str, str]
) -> None:
    server.answers.append(status(*answer))
    assert await client.delete(PODS, "gm-a", "p", uid="u1") is None


async def test_a_list_is_read_in_pages_and_only_of_what_is_ours(
    server: Server, client: ApiClient
) -> None:
    server.answers += [
        web.json_response(
            {"metadata": {"continue": "more"}, "items": [{"metadata": {"uid": "1"}}]}
        ),
        web.json_response(
            {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {"uid": "2"}}]}
        ),
    ]
    found, version = await client.list_metadata(PODS)
    assert [each["metadata"]["uid"] for each in found] == ["1", "2"]
    assert version == "9"
    assert "labelSelector=app.kubernetes.io/managed-by%3Dgristmill" in server.asked[0][1]
    assert "continue=more" in server.asked[1][1]
    assert "PartialObjectMetadataList" in server.asked[0][2]["Accept"]


async def test_pages_of_a_version_that_is_no_longer_kept_are_read_anew(
    server: Server, client: ApiClient
) -> None:
    """It must not end the process, whose start this may be."""
    server.answers += [
        web.json_response(
            {"metadata": {"continue": "more"}, "items": [{"metadata": {"uid": "old"}}]}
        ),
        status(410, "Expired", "the provided continue parameter is too old"),
        web.json_response(
            {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {"uid": "1"}}]}
        ),
    ]
    found, version = await client.list_metadata(PODS)
    assert [each["metadata"]["uid"] for each in found] == ["1"]
    assert version == "9"
    assert "continue" not in server.asked[2][1]


async def test_a_read_is_tried_again_and_a_write_is_not(server: Server, client: ApiClient) -> None:
    for _ in range(2):
        server.answers.append(status(429, "TooManyRequests", "busy", **{"Retry-After": "0"}))
    await client.get(NODES, "", "n")
    assert len(server.asked) == 3
    server.answers += [status(429, "TooManyRequests", "busy", **{"Retry-After": "3"})]
    with pytest.raises(ThrottledError) as raised:
        await client.merge_patch(SESSIONS, "gm-a", "s", {})
    assert raised.value.retry_after_s == 3
    assert len(server.asked) == 4


async def test_requests_are_counted_by_verb_and_code(server: Server, client: ApiClient) -> None:
    counted: list[tuple[str, str]] = []
    client.count = lambda verb, code, seconds: counted.append((verb, code))
    await client.get(NODES, "", "n")
    server.answers.append(status(404, "NotFound", "no"))
    with pytest.raises(NotFoundError):
        await client.get(NODES, "", "n")
    await client.apply(SESSIONS, {"metadata": {"namespace": "a", "name": "s"}})
    assert counted == [("get", "200"), ("get", "404"), ("apply", "200")]


async def test_who_does_not_lead_sends_no_write(server: Server, client: ApiClient) -> None:
    def fence() -> float:
        raise NotLeaderError("not any more")

    client.fence = fence
    body = {"metadata": {"namespace": "gm-a", "name": "s"}}
    writes = (
        client.create(PODS, body),
        client.apply(PODS, body),
        client.merge_patch(SESSIONS, "gm-a", "s", {}, subresource="status"),
        client.json_patch(SESSIONS, "gm-a", "s", []),
        client.delete(PODS, "gm-a", "p", uid="u"),
    )
    for write in writes:
        with pytest.raises(NotLeaderError):
            await write
    await client.get(NODES, "", "n")
    assert [each[0] for each in server.asked] == ["GET"]


async def test_a_write_is_given_up_when_the_lead_may_be_over(
    server: Server, client: ApiClient
) -> None:
    server.hold = asyncio.Event()
    client.fence = lambda: 0.2
    with pytest.raises(UnavailableError, match="did not answer"):
        await asyncio.wait_for(client.merge_patch(SESSIONS, "gm-a", "s", {}), 5)


async def test_a_cut_answer_is_no_answer(server: Server, client: ApiClient) -> None:
    server.answers.append(web.Response(body=b'{"metadata": {"na', content_type="application/json"))
    with pytest.raises(UnavailableError):
        await client.merge_patch(SESSIONS, "gm-a", "s", {})


# --- credentials ---------------------------------------------------------------------------------


def test_a_token_in_a_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_operator.credentials.TOKEN_AGE_S_MAX", -1.0)
    file = tmp_path / "token"
    file.write_text("old\n")
    token = Token(file=file)
    assert token.value() == "old"
    file.write_text("new\n")
    assert token.value() == "new"


async def test_a_refused_token_is_read_anew_and_the_request_sent_again(
    tmp_path: Path, server: Server
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    access = Access(server=server.url, tls=None, token=Token(file=file))
    async with access.session(connections_max=2, user_agent="x") as http:
        await http.get(server.url)
        file.write_text("new")
        server.answers.append(status(401, "Unauthorized", "expired"))
        answer = await http.post(server.url, json={"x": 1})
    assert answer.status == 200
    assert [each[2]["Authorization"] for each in server.asked] == [
        "Bearer old",
        "Bearer old",
        "Bearer new",
    ]
    assert server.asked[2][3] == {"x": 1}, "with its body"


async def test_a_kubeconfig_gives_address_and_token(tmp_path: Path, server: Server) -> None:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server.url + "/"}}],
        "users": [{"name": "u", "user": {"token": "secret-1"}}],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(config))
    access = find_access(path)
    assert access.server == server.url
    async with access.session(connections_max=2, user_agent="x") as http:
        await http.get(access.server)
    assert server.asked[0][2]["Authorization"] == "Bearer secret-1"
    assert find_access(path, "http://127.0.0.1:1").server == "http://127.0.0.1:1"


def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="nowhere"):
        find_access(tmp_path / "nowhere")


def test_a_kubeconfig_may_name_a_program_that_prints_the_token(tmp_path: Path) -> None:
    """As those of cloud providers do."""
    printed = {
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
        "status": {"token": "of-a-program"},
    }  # fmt: skip
    program = {
        "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
        "command": "echo", "args": [json.dumps(printed)],
    }  # fmt: skip
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"exec": program}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(config))
    assert find_access(path).token.value() == "of-a-program"
    program["command"] = "false"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(InvalidRequestError, match="the program that the kubeconfig names"):
        find_access(path).token.value()


# --- start ---------------------------------------------------------------------------------------


async def test_missing_definitions_are_named(server: Server, client: ApiClient) -> None:
    server.by_path = {
        "/version": {"major": "1", "minor": "33+"},
        "/apis/authorization.k8s.io/": {"metadata": {}, "status": {"allowed": True}},
        "/apis/gristmill.dev/v1alpha1": {"metadata": {}, "resources": [{"name": "tenants"}]},
    }
    with pytest.raises(NotFitError, match=r"trainingsessions, basemodels, ratecards.*install"):
        await check(client, "gristmill-system")
    kinds = [{"name": kind.plural} for kind in PRIMARY]
    server.by_path["/apis/gristmill.dev/v1alpha1"] = {"metadata": {}, "resources": kinds}
    assert not await check(client, "gristmill-system"), "1.33 serves no streaming lists"
    server.by_path["/version"] = {"major": "1", "minor": "34"}
    assert await check(client, "gristmill-system")


async def test_the_cluster_key_is_made_once_and_read_ever_after(tmp_path: Path) -> None:
    api = SmallApi()
    key = await ensure_key(api, "gristmill-system", tmp_path / "not-there")
    assert len(key) == 32
    assert await ensure_key(api, "gristmill-system", None) == key
    assert sum(call.startswith("create") for call in api.calls) == 1
    file = tmp_path / "cluster.key"
    file.write_bytes(b"x" * 32)
    assert await ensure_key(api, "gristmill-system", file) == b"x" * 32
    file.write_bytes(b"x" * 31)
    with pytest.raises(InvalidRequestError, match="31 bytes"):
        await ensure_key(api, "gristmill-system", file)

"""Base models as hub contents: what the SDK's model look-up reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.errors import GristmillError, InvalidRequestError, NotFoundError
from gristmill_gateway.sagemaker import hub_calls
from gristmill_sessions.local import open_local_store
from gristmill_testing.control_plane import FakeCaller, FakeContext, base_model
from gristmill_testing.wire_shapes import output_problems

CALLER = FakeCaller()
HUB = {"HubName": "SageMakerPublicHub", "HubContentType": "Model"}


@pytest.fixture(name="plane")
def plane_fixture(tmp_path: Path) -> FakeContext:
    """The hub needs no ledger."""
    store = open_local_store(tmp_path / "store.sqlite3")
    for name, identity in (
        ("tiny", "Lab/Tiny-LM"), ("local", "/models/local"), ("plain", "no-slash"),
        ("long", "/" + "x" * 400),
    ):  # fmt: skip
        store.create(base_model(name, identity))
    nothing: Any = None
    return FakeContext(store=store, ledger=nothing, ledger_admin=nothing)


async def call(plane: FakeContext, operation: str, body: dict[str, Any]) -> Any:
    answer = await getattr(hub_calls, operation)(plane, CALLER, body)
    name = "".join(part.title() for part in operation.split("_"))
    assert output_problems("sagemaker", name, answer) == []
    return answer


async def names(plane: FakeContext, **body: Any) -> list[str]:
    answer = await call(plane, "list_hub_contents", HUB | body)
    return [each["HubContentName"] for each in answer["HubContentSummaries"]]


async def test_every_model_is_listed_as_trainable_under_its_id(plane: FakeContext) -> None:
    answer = await call(plane, "list_hub_contents", HUB)
    keywords = {
        each["HubContentName"]: each["HubContentSearchKeywords"]
        for each in answer["HubContentSummaries"]
    }
    capability = "@capability:training_session"
    assert keywords == {
        "tiny": [capability, "@huggingface-id:lab/tiny-lm"],
        "local": [capability, "@huggingface-id:/models/local"],
        "plain": [capability],
        "long": [capability],
    }


async def test_a_models_document_keeps_its_id_as_spelt(plane: FakeContext) -> None:
    for hub in ("SageMakerPublicHub", "arn:aws:sagemaker:us-west-2:aws:hub/SageMakerPublicHub"):
        body = HUB | {"HubName": hub, "HubContentName": "tiny"}
        answer = await call(plane, "describe_hub_content", body)
        assert json.loads(answer["HubContentDocument"])["HuggingfaceId"] == "Lab/Tiny-LM"
        assert answer["HubContentArn"] == (
            "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/tiny/1.0.0"
        )


async def test_models_are_listed_sorted_filtered_and_page_by_page(plane: FakeContext) -> None:
    assert await names(plane) == ["long", "plain", "local", "tiny"]
    assert await names(plane, SortBy="HubContentName", SortOrder="Ascending") == [
        "local", "long", "plain", "tiny",
    ]  # fmt: skip
    assert await names(plane, NameContains="lo") == ["long", "local"]
    assert await names(plane, HubContentType="Notebook") == []
    assert await names(plane, MaxSchemaVersion="1.0.0") == []
    assert await names(plane, CreationTimeBefore=1.0) == []
    assert await names(plane, CreationTimeAfter=1.0) == ["long", "plain", "local", "tiny"]
    body: dict[str, Any] = HUB | {"MaxResults": 3}
    first = await call(plane, "list_hub_contents", body)
    rest = await call(plane, "list_hub_contents", body | {"NextToken": first["NextToken"]})
    assert [each["HubContentName"] for each in rest["HubContentSummaries"]] == ["tiny"]
    assert "NextToken" not in rest


async def test_the_hub_itself_is_described(plane: FakeContext) -> None:
    answer = await call(plane, "describe_hub", {"HubName": "SageMakerPublicHub"})
    assert answer["HubStatus"] == "InService"


BAD: list[tuple[str, dict[str, Any], type[GristmillError], str]] = [
    ("list_hub_contents", {"HubName": "SageMakerPublicHub"}, InvalidRequestError, "HubContentType is required"),
    ("list_hub_contents", HUB | {"HubContentType": "Song"}, InvalidRequestError, "Song"),
    ("list_hub_contents", HUB | {"HubName": "mine"}, NotFoundError, "SageMakerPublicHub"),
    ("list_hub_contents", HUB | {"HubName": "a b"}, InvalidRequestError, "a b"),
    ("list_hub_contents", HUB | {"NextToken": "forged"}, InvalidRequestError, "NextToken"),
    ("list_hub_contents", HUB | {"MaxSchemaVersion": "99999"}, InvalidRequestError, "MaxSchemaVersion"),
    ("describe_hub_content", HUB | {"HubContentName": "none"}, NotFoundError, "there are: local, long, plain, tiny"),
    ("describe_hub_content", HUB | {"HubContentName": "tiny", "HubContentVersion": "2.0.0"}, NotFoundError, "1.0.0"),
    ("describe_hub_content", HUB | {"HubContentName": "tiny", "HubContentType": "Notebook"}, NotFoundError, "Model alone"),
    ("describe_hub_content", HUB | {"HubContentName": "../tiny"}, InvalidRequestError, "HubContentName"),
    ("describe_hub", {"HubName": "other"}, NotFoundError, "other"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "body", "error", "text"), BAD)
async def test_a_bad_request_is_refused_by_name_and_value(
    plane: FakeContext, operation: str, body: dict[str, Any], error: type[GristmillError], text: str
) -> None:
    with pytest.raises(error) as caught:
        await call(plane, operation, body)
    assert text in caught.value.message


async def test_an_id_of_two_models_is_refused_with_both_names(plane: FakeContext) -> None:
    plane.store.create(base_model("tiny-two", "Other/Tiny-LM"))
    with pytest.raises(InvalidRequestError, match="tiny, tiny-two"):
        await call(plane, "describe_hub_content", HUB | {"HubContentName": "Tiny-LM"})

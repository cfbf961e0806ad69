"""The sample manifests are taken on one machine, too."""

import json
from pathlib import Path

import pytest
import yaml

from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_testing.cli import Commands

SAMPLES = Path(__file__).parents[2] / "recipes/manifests"


def sample(name: str) -> dict[str, object]:
    read: dict[str, object] = yaml.safe_load((SAMPLES / f"{name}.yaml").read_text())
    return read


def prepared(folder: Path) -> Path:
    folder.mkdir(parents=True)
    facts = {
        "architecture": "LlamaForCausalLM",
        "vocabulary_size": 49152,
        "context_length": 8192,
        "revision": "r1",
        "dtype": "bfloat16",
        "hugging_face_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    return folder


def apply_text(commands: Commands, document: object, *options: str) -> str:
    return commands.ok("apply", "-f", "-", *options, text=yaml.safe_dump(document))


def test_prices_tenant_and_sessions_are_applied_as_they_are(commands: Commands) -> None:
    for name in ("ratecard", "tenant"):
        assert commands.ok("apply", "-f", str(SAMPLES / f"{name}.yaml")).endswith("created\n")
    for name in ("session", "session-multi-rank"):
        path = str(SAMPLES / f"{name}.yaml")
        assert commands.ok("apply", "--tenant", "research", "-f", path).endswith("created\n")
        assert commands.ok("apply", "--tenant", "research", "-f", path).endswith("unchanged\n")
    assert commands.store.get(RateCard, "", "standard-2026").spec.currency == "USD"
    assert commands.store.get(Tenant, "", "research").spec.rate_card_ref is not None
    names = [each.metadata.name for each in commands.store.list(TrainingSession, "research")]
    assert names == ["first-run", "two-ranks"]


def test_a_model_is_prepared_from_its_folder_and_its_ways_to_run_change(
    commands: Commands, tmp_path: Path
) -> None:
    model = sample("model")
    spec = model["spec"]
    assert isinstance(spec, dict)
    spec["weights"] = {"path": str(prepared(tmp_path / "smol"))}
    assert apply_text(commands, model).endswith("created\n")
    known = commands.store.get(BaseModelResource, "", "smollm2-135m-instruct").spec
    assert [each.name for each in known.profiles] == ["default", "gpu"]
    assert known.revision == "r1"
    assert apply_text(commands, model).endswith("unchanged\n")
    spec["deprecated"] = True
    assert apply_text(commands, model).endswith("configured\n")
    commands.ok("models", "add", "smollm2-135m-instruct", str(tmp_path / "smol"))
    assert commands.store.get(BaseModelResource, "", "smollm2-135m-instruct").spec.deprecated


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"pvc": {"claimName": "w"}}, "on one machine spec.weights is a path or a hubRef"),
        (
            {"hubRef": {"repository": "a/b", "revision": "v1"}},
            "spec.weights.hubRef.revision is 'v1'; on one machine only `main` is fetched",
        ),
    ],
)
def test_weights_that_only_a_cluster_has_are_refused(
    commands: Commands, weights: object, said: str
) -> None:
    model = sample("model")
    assert isinstance(model["spec"], dict)
    model["spec"]["weights"] = weights
    assert said in commands.refused("apply", "-f", "-", text=yaml.safe_dump(model))
    assert commands.store.list(BaseModelResource) == []


def test_a_card_needs_all_four_prices_and_never_changes(commands: Commands) -> None:
    card = sample("ratecard")
    spec = card["spec"]
    assert isinstance(spec, dict)
    whole = list(spec["prices"])
    spec["prices"] = whole[:3]
    said = commands.refused("apply", "-f", "-", text=yaml.safe_dump(card))
    assert "spec.prices has 3 of the 4 prices of model '*'" in said
    spec["prices"] = whole
    apply_text(commands, card)
    spec["currency"] = "EUR"
    said = commands.refused("apply", "-f", "-", text=yaml.safe_dump(card))
    assert "the prices of a card never change" in said

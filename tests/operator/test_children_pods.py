"""Pods as the API server gets them. A change of a template is a change of a file in golden/, to be read."""

import base64
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest

from gristmill_contracts import labels
from gristmill_contracts.base_model import DeviceRequest, DraRequest, Profile, Toleration
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import Assignment
from gristmill_contracts.secrets import attempt_secret, producer_secret
from gristmill_contracts.session import PinnedStatus, TrainingSession
from gristmill_operator.children.claims import device_claims
from gristmill_operator.children.manifest import ASKED_HASH, asked
from gristmill_operator.children.pins import pins
from gristmill_operator.children.pods import worker_pod
from gristmill_operator.children.seating import Seating, state_claim_name
from gristmill_operator.children.secret import attempt_credentials
from gristmill_operator.children.service import rank_names
from gristmill_operator.children.volume import state_claim
from gristmill_operator.children.weights import WeightsMount, WeightsRefused, weights_mount
from gristmill_testing.cluster_objects import (
    CLUSTER_KEY,
    METER_IMAGE,
    SESSION_UID,
    WORKER_IMAGE,
    a_card,
    a_model,
    a_seating,
    a_session,
    a_tenant,
)

GOLDEN = Path(__file__).parent / "golden"


def mount_of(seating: Seating) -> WeightsMount:
    mount = weights_mount(seating.model, seating.options)
    assert isinstance(mount, WeightsMount)
    return mount


def pod(seating: Seating, rank: int = 0) -> dict[str, Any]:
    return worker_pod(seating, rank, mount_of(seating))


def container(made: dict[str, Any], name: str) -> dict[str, Any]:
    spec = made["spec"]
    return next(
        each
        for each in [*spec.get("initContainers", []), *spec["containers"]]
        if each["name"] == name
    )


def environment(made: dict[str, Any], name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(made, name)["env"]}


def full_seating() -> Seating:
    """Everything that a pod can be told, at once."""
    profile = Profile(
        name="large",
        device=DeviceRequest(resource_name="nvidia.com/gpu", count=2),
        node_selector={"nvidia.com/gpu.product": "H200"},
        tolerations=[Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")],
        shm_size="8Gi",
    )
    return a_seating(
        a_session(base_model_ref={"name": "tiny", "profile": "large"}, workers=2),
        a_tenant(runtime_class_name="gvisor", priority_class_name="batch"),
        a_model(profiles=[profile]),
        attempt=3,
        image_pull_secrets=("registry",),
    )


@pytest.mark.parametrize(
    ("name", "made"),
    [
        pytest.param("pod-single", pod(a_seating()), id="one worker"),
        pytest.param("pod-rank-0", pod(full_seating()), id="rank 0 of two"),
        pytest.param("pod-rank-1", pod(full_seating(), 1), id="rank 1 of two"),
    ],
)
def test_a_pod_is_the_one_on_record(name: str, made: dict[str, Any]) -> None:
    path = GOLDEN / f"{name}.json"
    if os.environ.get("GRISTMILL_WRITE_GOLDEN"):
        path.write_text(json.dumps(made, indent=2) + "\n")
    assert made == json.loads(path.read_text()), (
        f"the template changed: if it is meant, run with GRISTMILL_WRITE_GOLDEN=1 and read {path.name}"
    )


@pytest.mark.parametrize(
    "made", [pod(a_seating()), pod(full_seating(), 1)], ids=["rank 0", "rank 1"]
)
def test_a_pod_keeps_to_the_restricted_level_and_gets_no_token(made: dict[str, Any]) -> None:
    spec = made["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 120
    assert spec["securityContext"]["fsGroup"] == 10_000
    for each in [*spec.get("initContainers", []), *spec["containers"]]:
        context = each["securityContext"]
        assert context["runAsUser"] in (10_001, 10_002)
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret", "image"}


def test_the_worker_sees_neither_the_log_nor_a_secret() -> None:
    mounts = container(pod(a_seating()), "worker")["volumeMounts"]
    assert {(each["name"], each.get("subPath")) for each in mounts if each["name"] == "state"} == {
        ("state", "worker"),
        ("state", "artifacts"),
    }
    assert {"assignment", "producer"}.isdisjoint(each["name"] for each in mounts)


@pytest.mark.parametrize(
    ("rank", "volume"), [(0, ("state", "worker")), (1, ("scratch", None))], ids=["rank 0", "rank 1"]
)
def test_compiled_kernels_lie_on_the_sessions_volume_where_the_worker_alone_writes(
    rank: int, volume: tuple[str, str | None]
) -> None:
    """They are run as code: neither another session nor the meter may write them."""
    made = pod(full_seating(), rank)
    kernels = PurePosixPath(environment(made, "worker")["TORCHINDUCTOR_CACHE_DIR"])

    def mounted(name: str) -> set[tuple[str, str | None]]:
        return {
            (each["name"], each.get("subPath"))
            for each in container(made, name)["volumeMounts"]
            if kernels.is_relative_to(each["mountPath"])
        }

    assert mounted("worker") == {volume}
    if rank == 0:
        assert mounted("meter") == set()
        (state,) = (each for each in made["spec"]["volumes"] if each["name"] == "state")
        assert state["persistentVolumeClaim"]["claimName"] == state_claim_name(full_seating().name)
    tmp = environment(made, "worker")["TMPDIR"]
    assert not kernels.is_relative_to(tmp)


def test_only_rank_0_has_a_meter_and_the_volume() -> None:
    seating = full_seating()
    assert [each["name"] for each in pod(seating, 0)["spec"]["initContainers"]] == ["meter"]
    other = pod(seating, 1)["spec"]
    assert "initContainers" not in other
    assert not any(each["name"] == "state" for each in other["volumes"])


def test_ranks_find_rank_0_by_name_before_it_is_ready() -> None:
    seating = full_seating()
    command = container(pod(seating, 1), "worker")["command"]
    told = dict(zip(command[3:-2:2], command[4:-2:2], strict=True))
    assert (told["--node-rank"], told["--nnodes"]) == ("1", "2")
    assert told["--master-addr"] == "run-a3-0.run"
    service = rank_names(seating)
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "None"
    leader = pod(seating, 0)
    assert (leader["spec"]["hostname"], leader["spec"]["subdomain"]) == (
        "run-a3-0",
        service["metadata"]["name"],
    )
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()


def test_a_pinned_session_keeps_its_images_over_an_upgrade_of_the_operator() -> None:
    """G10: what another default would change is not changed for a session that has begun."""
    first = a_seating()
    pinned = pins(first, a_card())
    assert (pinned.image, pinned.meter_image) == (WORKER_IMAGE, METER_IMAGE)
    assert (pinned.base_model_uid, pinned.rate_card_uid) == ("model-uid-1", "card-uid-1")
    assert pinned.rate_card_hash
    assert pinned.template_hash == pod(first)["metadata"]["labels"][labels.TEMPLATE_HASH]
    later = a_seating(_with_pins(pinned), attempt=2, meter_image="registry.test/meter:new")
    assert container(pod(later), "meter")["image"] == METER_IMAGE
    unpinned = a_seating(meter_image="registry.test/meter:new")
    assert container(pod(unpinned), "meter")["image"] == "registry.test/meter:new"


KNOWN_SINCE_0_1 = {
    "METER": "ARTIFACTS_DIR ASSIGNMENTS_DIR DATA_DIR DRAIN_S HOST LEDGER_URL LOG_LEVEL PORT PRODUCER_SECRET_FILE "
    "READY_WHEN WORKER_SOCKET WORKER_STATE_DIR",
    "WORKER": "ARTIFACTS_DIR DTYPE MODEL_DIR MODEL_NAME READY_FILE SHUTDOWN_S SOCKET SOCKET_MODE",
}
"""Settings that images of release 0.1 know. Never to be added to: a later one is given where somebody asks for it."""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_image_of_the_first_release_knows_every_setting_that_it_is_given(rank: int) -> None:
    """Images are pinned and templates are not: a variable that it does not know ends a process at its start."""
    known = {
        f"GRISTMILL_{part}_{name}"
        for part, names in KNOWN_SINCE_0_1.items()
        for name in names.split()
    }
    spec = pod(a_seating(a_session(workers=2)), rank)["spec"]
    given = {
        variable["name"]
        for each in [*spec.get("initContainers", []), *spec["containers"]]
        for variable in each["env"]
        if variable["name"].startswith("GRISTMILL_")
    }
    assert given
    assert given - known == set()


def _with_pins(pinned: PinnedStatus) -> TrainingSession:
    session = a_session()
    status = session.status.model_copy(update={"pinned": pinned})
    return session.model_copy(update={"status": status})


def test_the_template_hash_is_of_the_template_and_not_of_the_attempt() -> None:
    hashes = [
        pod(seating)["metadata"]["labels"][labels.TEMPLATE_HASH]
        for seating in (
            a_seating(attempt=1),
            a_seating(attempt=2),
            a_seating(meter_memory="1Gi"),
        )
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_pod_carries_the_restart_that_it_obeys() -> None:
    session = a_session()
    asked_for = session.metadata.model_copy(update={"annotations": {labels.RESTART: "2"}})
    made = pod(a_seating(session.model_copy(update={"metadata": asked_for})))
    assert made["metadata"]["annotations"][labels.RESTART] == "2"
    assert labels.RESTART not in pod(a_seating())["metadata"]["annotations"]


def test_the_secret_of_an_attempt_holds_what_gateway_and_ledger_derive() -> None:
    secret = attempt_credentials(a_seating(attempt=2), CLUSTER_KEY)
    assert secret["immutable"] is True
    text = base64.b64decode(secret["data"][f"{SESSION_UID}.json"])
    told = msgspec.json.decode(text, type=Assignment)
    assert (told.tenant, told.attempt, told.desired) == ("acme", 2, "serve")
    assert told.secret == attempt_secret(CLUSTER_KEY, told.uid, 2)
    shown = base64.b64decode(secret["data"]["producer"]).decode()
    assert shown == producer_secret(CLUSTER_KEY, told.uid, 2)


def test_a_kept_volume_has_no_owner_and_one_that_goes_with_the_session_has() -> None:
    kept = state_claim(a_seating())
    assert "ownerReferences" not in kept["metadata"]
    going = a_seating(a_session(storage={"retain": "Delete", "size": "3Gi"}))
    claim = state_claim(going)
    assert claim["metadata"]["ownerReferences"][0]["uid"] == SESSION_UID
    assert claim["spec"]["resources"]["requests"] == {"storage": "3Gi"}
    holding = state_claim(going, unflushed=True)
    assert "ownerReferences" not in holding["metadata"]
    assert holding["metadata"]["labels"][labels.UNFLUSHED] == "true"
    inherited = state_claim(going, kept=True)
    assert "ownerReferences" not in inherited["metadata"]


def test_devices_are_named_by_the_profile_alone() -> None:
    profile = Profile(device=DeviceRequest(resource_name="amd.com/gpu", count=4))
    resources = container(pod(a_seating(model=a_model(profiles=[profile]))), "worker")["resources"]
    assert resources["requests"]["amd.com/gpu"] == resources["limits"]["amd.com/gpu"] == "4"


def test_a_dra_profile_claims_its_devices_by_a_template() -> None:
    request = DraRequest(device_class_name="gpu.example.com", count=2, selectors=["true"])
    seating = a_seating(model=a_model(profiles=[Profile(dra=request)]))
    made = pod(seating)
    template = device_claims(seating, request)
    assert made["spec"]["resourceClaims"] == [
        {"name": "devices", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    assert container(made, "worker")["resources"]["claims"] == [{"name": "devices"}]
    wanted = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert (wanted["deviceClassName"], wanted["count"]) == ("gpu.example.com", 2)


@pytest.mark.parametrize(
    ("weights", "settings", "volume"),
    [
        pytest.param(
            {"pvc": {"claimName": "w"}},
            {},
            {"persistentVolumeClaim": {"claimName": "w", "readOnly": True}},
            id="a claim",
        ),
        pytest.param(
            {"hubRef": {"repository": "a/b"}},
            {},
            {"persistentVolumeClaim": {"claimName": "gm-weights.tiny", "readOnly": True}},
            id="the hub",
        ),
        pytest.param(
            {"image": {"reference": "r/w@sha256:" + "c" * 64}},
            {},
            {"image": {"reference": "r/w@sha256:" + "c" * 64, "pullPolicy": "IfNotPresent"}},
            id="an image",
        ),
        pytest.param(
            {"path": "/srv/w"},
            {"node_paths": True},
            {"hostPath": {"path": "/srv/w", "type": "Directory"}},
            id="a folder where it is allowed",
        ),
    ],
)
def test_weights_come_read_only_from_their_source(
    weights: dict[str, Any], settings: dict[str, Any], volume: dict[str, Any]
) -> None:
    seating = a_seating(model=a_model(weights=weights), **settings)
    made = pod(seating)
    assert {"name": "weights", **volume} in made["spec"]["volumes"]
    mounts = [
        each for each in container(made, "worker")["volumeMounts"] if each["name"] == "weights"
    ]
    assert [(each["mountPath"], each["readOnly"]) for each in mounts] == [("/models/tiny", True)]


@pytest.mark.parametrize(
    ("weights", "settings", "reason", "said"),
    [
        pytest.param({"path": "/srv/w"}, {}, "NodePathRefused", "weights.pvc", id="a folder"),
        pytest.param({}, {}, "WeightsInvalid", "exactly one", id="nothing"),
        pytest.param(
            {"path": "/a", "hubRef": {"repository": "a/b"}},
            {},
            "WeightsInvalid",
            "2 sources",
            id="two",
        ),
        pytest.param(
            {"image": {"reference": "r/w@sha256:" + "c" * 64}},
            {"image_volumes": False},
            "ImageVolumesUnsupported",
            "weights.hubRef",
            id="an image where none is served",
        ),
    ],
)
def test_weights_that_cannot_be_mounted_are_refused_with_the_remedy(
    weights: dict[str, Any], settings: dict[str, Any], reason: str, said: str
) -> None:
    seating = a_seating(model=a_model(weights=weights), **settings)
    refused = weights_mount(seating.model, seating.options)
    assert isinstance(refused, WeightsRefused)
    assert refused.reason == reason
    assert said in refused.message


def test_an_unknown_profile_is_refused_with_those_that_there_are() -> None:
    seating = a_seating(a_session(base_model_ref={"name": "tiny", "profile": "huge"}))
    with pytest.raises(InvalidRequestError, match=r"no profile 'huge'; it has default"):
        _ = seating.profile


def test_the_longest_names_fit_into_labels_and_host_names() -> None:
    """G50: 40 characters, the 999999th attempt, rank 63."""
    made = pod(a_seating(a_session("a" * 40, workers=64), attempt=999_999), 63)
    assert len(made["spec"]["hostname"]) <= 63
    assert all(len(value) <= 63 for value in made["metadata"]["labels"].values())


def test_the_hash_of_what_was_asked_shows_a_field_that_was_taken_away() -> None:
    before, after = state_claim(a_seating()), state_claim(a_seating(storage_class="fast"))
    marks = [asked(each)["metadata"]["annotations"][ASKED_HASH] for each in (before, before, after)]
    assert marks[0] == marks[1] != marks[2]

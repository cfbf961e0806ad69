"""Where a model's weights come from in a tenant's namespace, as a volume or as a reason why not. Pure."""

from dataclasses import dataclass
from typing import Any, Final

from gristmill_contracts.base_model import BaseModelResource, WeightsSpec
from gristmill_operator.children.manifest import hash_of
from gristmill_operator.children.options import ChildOptions
from gristmill_operator.children.seating import weights_claim_name

VOLUME: Final = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRefused:
    """These weights cannot be mounted here, whatever the pods look like."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMount:
    volume: dict[str, Any]  # Any: a volume of a pod
    sub_path: str = ""
    claim: str = ""
    """The claim in the tenant's namespace that has to be there and filled; empty = none."""


def weights_mount(model: BaseModelResource, options: ChildOptions) -> WeightsMount | WeightsRefused:
    """How a pod gets the weights, read-only."""
    name, weights = model.metadata.name, model.spec.weights
    if _sources(weights) != 1:
        return WeightsRefused(
            reason="WeightsInvalid",
            message=f"base model {name!r} names {_sources(weights)} sources of weights; "
            "spec.weights must have exactly one of pvc, hubRef, image, path",
        )
    if weights.image is not None:
        return _image(name, weights.image.reference, options)
    if weights.path:
        return _path(name, weights.path, options)
    if weights.pvc is not None:
        return _claim(weights.pvc.claim_name, weights.pvc.sub_path)
    return _claim(weights_claim_name(name), fetched_folder(model))


def fetched_folder(model: BaseModelResource) -> str:
    """Folder on the volume, by what is in it: a model that is made again finds its weights, and only its."""
    hub = model.spec.weights.hub_ref
    source = ("", "") if hub is None else (hub.repository, hub.revision)
    return f"prepared-{hash_of([*source, model.spec.dtype])}"


def _sources(weights: WeightsSpec) -> int:
    given = (weights.path, weights.pvc, weights.hub_ref, weights.image)
    return sum(bool(each) for each in given)


def _claim(claim: str, sub_path: str) -> WeightsMount:
    # Read-only for the whole pod: the kubelet then leaves the owner of the files alone.
    volume = {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return WeightsMount(volume=volume, sub_path=sub_path, claim=claim)


def _image(name: str, reference: str, options: ChildOptions) -> WeightsMount | WeightsRefused:
    if not options.images.image_volumes:
        return WeightsRefused(
            reason="ImageVolumesUnsupported",
            message=f"base model {name!r} takes its weights from image {reference}, but this cluster "
            "serves no image volumes; use weights.pvc or weights.hubRef",
        )
    image = {"reference": reference, "pullPolicy": options.images.pull_policy}
    return WeightsMount(volume={"name": VOLUME, "image": image})


def _path(name: str, path: str, options: ChildOptions) -> WeightsMount | WeightsRefused:
    if not options.storage.node_paths:
        return WeightsRefused(
            reason="NodePathRefused",
            message=f"base model {name!r} takes its weights from the folder {path!r} of the node, which "
            "the restricted Pod Security level refuses; make a read-only volume of the folder and name "
            "its claim in weights.pvc, or set the operator's storage.nodePaths",
        )
    return WeightsMount(
        volume={"name": VOLUME, "hostPath": {"path": path, "type": "Directory"}},
    )

"""Checkpoints of the ledger as model packages. Pure.

A checkpoint group is a model package group, a checkpoint a version in it. Weights become a package to
deploy, states one that says `IsCheckpoint`; the SDK tells the two apart by that alone.
"""

from typing import Any, Final

from gristmill_contracts.http import Checkpoint, CheckpointGroup
from gristmill_gateway import locations
from gristmill_gateway.sagemaker import arns
from gristmill_gateway.sagemaker.arns import PackageName, Scope
from gristmill_gateway.sagemaker.registry_validate import ListModelPackages

Shape = dict[str, Any]  # Any: a shape of the service model as JSON

DESCRIPTION_CHARS_MAX: Final = 1024


def describe_group(group: CheckpointGroup, scope: Scope) -> Shape:
    """DescribeModelPackageGroupOutput."""
    shape: Shape = {
        "ModelPackageGroupName": group.name,
        "ModelPackageGroupArn": arns.group_arn(scope, group.name),
        "CreationTime": _seconds(group.created_us),
        "CreatedBy": {},
        "ModelPackageGroupStatus": "Completed",
    }
    if group.description:
        shape["ModelPackageGroupDescription"] = group.description
    return shape


def summary(checkpoint: Checkpoint, scope: Scope) -> Shape:
    """ModelPackageSummary."""
    package = PackageName(checkpoint.group, checkpoint.version)
    shape: Shape = {
        "ModelPackageGroupName": checkpoint.group,
        "ModelPackageVersion": checkpoint.version,
        "ModelPackageArn": arns.package_arn(scope, package),
        "CreationTime": _seconds(checkpoint.created_us),
        "ModelPackageStatus": "Completed",
        "ModelPackageRegistrationType": "Registered",
    }
    if checkpoint.description:
        shape["ModelPackageDescription"] = checkpoint.description[:DESCRIPTION_CHARS_MAX]
    return shape


def describe(checkpoint: Checkpoint, scope: Scope) -> Shape:
    """DescribeModelPackageOutput. A versioned package has its group's name."""
    return summary(checkpoint, scope) | {
        "ModelPackageName": checkpoint.group,
        "InferenceSpecification": {"Containers": [_container(checkpoint)]},
        "ModelPackageStatusDetails": {
            "ValidationStatuses": [{"Name": checkpoint.group, "Status": "Completed"}]
        },
        "CertifyForMarketplace": False,
        "LastModifiedTime": _seconds(checkpoint.created_us),
        "CustomerMetadataProperties": {
            "kind": checkpoint.kind,
            "rank": str(checkpoint.rank),
            "alpha": str(checkpoint.alpha),
            "training-session": checkpoint.session,
            "size-bytes": str(checkpoint.size_bytes),
            "manifest-sha256": checkpoint.manifest_sha256,
        },
    }


def _container(checkpoint: Checkpoint) -> Shape:
    return {
        "IsCheckpoint": checkpoint.kind == "state",
        "BaseModel": {
            "HubContentName": checkpoint.model,
            "HubContentVersion": arns.MODEL_VERSION,
        },
        "ModelDataSource": {
            "S3DataSource": {
                "S3Uri": locations.checkpoint_uri(checkpoint.tenant, checkpoint.path),
                "S3DataType": "S3Prefix",
                "CompressionType": "None",
            }
        },
    }


def is_wanted(checkpoint: Checkpoint, request: ListModelPackages) -> bool:
    """Whether a checkpoint passes the filters of a list. Nothing here awaits anybody's approval."""
    created = _seconds(checkpoint.created_us)
    return (
        request.model_approval_status is None
        and request.model_package_type != "Unversioned"
        and (request.name_contains or "") in checkpoint.group
        and (request.creation_time_after is None or created > request.creation_time_after)
        and (request.creation_time_before is None or created < request.creation_time_before)
    )


def _seconds(time_us: int) -> float:
    return round(time_us / 1e6, 3)

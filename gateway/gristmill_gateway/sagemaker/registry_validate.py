"""Requests of the model registry and hub operations, bounded as in the service model."""

from typing import Annotated, Literal

from pydantic import Field

from gristmill_gateway.sagemaker.control_fields import (
    EntityName,
    EpochSeconds,
    MaxResults,
    NameContains,
    NextToken,
    Request,
    Tag,
)

SortOrder = Literal["Ascending", "Descending"]

_ArnOrName = Annotated[str, Field(min_length=1, max_length=170)]
"""Its form is read by `arns.parse_group`."""
_VersionedArnOrName = Annotated[str, Field(min_length=1, max_length=176)]
"""Its form is read by `arns.parse_package`."""
_HubNameOrArn = Annotated[str, Field(min_length=1, max_length=255)]
"""Its form is read by `arns.parse_hub`."""
_SCHEMA_VERSION = Annotated[
    str, Field(min_length=5, max_length=14, pattern=r"^\d{1,4}\.\d{1,4}\.\d{1,4}$")
]
_HUB_CONTENT_TYPE = Literal["Model", "Notebook", "ModelReference", "DataSet", "JsonDoc"]


class ManagedConfiguration(Request):
    managed_storage_type: Literal["Restricted"] | None = None


class CreateModelPackageGroup(Request):
    model_package_group_name: EntityName
    model_package_group_description: (
        Annotated[str, Field(max_length=1024, pattern=r"^[\p{L}\p{M}\p{Z}\p{S}\p{N}\p{P}]*$")]
        | None
    ) = None
    tags: Annotated[list[Tag], Field(max_length=50)] | None = None
    managed_configuration: ManagedConfiguration | None = None


class DescribeModelPackageGroup(Request):
    model_package_group_name: _ArnOrName


class ListModelPackages(Request):
    creation_time_after: EpochSeconds | None = None
    creation_time_before: EpochSeconds | None = None
    max_results: MaxResults | None = None
    name_contains: NameContains | None = None
    model_approval_status: Literal["Approved", "Rejected", "PendingManualApproval"] | None = None
    model_package_group_name: _ArnOrName | None = None
    model_package_type: Literal["Versioned", "Unversioned", "Both"] | None = None
    next_token: NextToken | None = None
    sort_by: Literal["Name", "CreationTime"] | None = None
    sort_order: SortOrder | None = None


class DescribeModelPackage(Request):
    model_package_name: _VersionedArnOrName
    included_data: Literal["AllData", "MetadataOnly"] | None = None


class DeleteModelPackage(Request):
    model_package_name: _VersionedArnOrName


class ListHubContents(Request):
    hub_name: _HubNameOrArn
    hub_content_type: _HUB_CONTENT_TYPE
    name_contains: NameContains | None = None
    max_schema_version: _SCHEMA_VERSION | None = None
    creation_time_before: EpochSeconds | None = None
    creation_time_after: EpochSeconds | None = None
    sort_by: Literal["HubContentName", "CreationTime", "HubContentStatus"] | None = None
    sort_order: SortOrder | None = None
    max_results: MaxResults | None = None
    next_token: NextToken | None = None


class DescribeHubContent(Request):
    hub_name: _HubNameOrArn
    hub_content_type: _HUB_CONTENT_TYPE
    hub_content_name: EntityName
    hub_content_version: _SCHEMA_VERSION | None = None


class DescribeHub(Request):
    hub_name: _HubNameOrArn

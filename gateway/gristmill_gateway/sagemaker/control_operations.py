"""The operations of the control plane by name: one table, which also says what is supported."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from gristmill_gateway.sagemaker import control, hub_calls, registry_calls
from gristmill_gateway.sagemaker.control_context import Caller, Context

Handler = Callable[[Context, Caller, dict[str, Any]], Awaitable[dict[str, Any]]]  # Any: JSON

OPERATIONS: Final[dict[str, Handler]] = {
    "CreateTrainingSession": control.create_training_session,
    "DescribeTrainingSession": control.describe_training_session,
    "ListTrainingSessions": control.list_training_sessions,
    "StopTrainingSession": control.stop_training_session,
    "DeleteTrainingSession": control.delete_training_session,
    "CreateModelPackageGroup": registry_calls.create_model_package_group,
    "DescribeModelPackageGroup": registry_calls.describe_model_package_group,
    "ListModelPackages": registry_calls.list_model_packages,
    "DescribeModelPackage": registry_calls.describe_model_package,
    "DeleteModelPackage": registry_calls.delete_model_package,
    "ListHubContents": hub_calls.list_hub_contents,
    "DescribeHubContent": hub_calls.describe_hub_content,
    "DescribeHub": hub_calls.describe_hub,
}

"""The environment in which the unmodified SDKs find this instance. Pure, but for one file."""

import shlex
from pathlib import Path
from typing import Final

import yaml

from gristmill_cli.local.layout import DATA_DIR_VARIABLE
from gristmill_contracts.credentials import AccessKey
from gristmill_contracts.tenant import Tenant

REGION: Final = "us-west-2"
"""Any real region does: the SDKs check its form, and every address is overridden."""


def default_bucket(tenant: Tenant) -> str:
    return tenant.spec.default_bucket or f"gristmill-{tenant.status.account_id}"


def role_arn(tenant: Tenant) -> str:
    """Sessions here have one role for all of a tenant; SDK calls want an ARN for it."""
    return f"arn:aws:iam::{tenant.status.account_id}:role/gristmill"


def user_config(tenant: Tenant) -> str:
    """The SDK's configuration file: it keeps the SDK from asking AWS for an account, or telling it
    what is used."""
    return yaml.safe_dump(
        {
            "SchemaVersion": "1.0",
            "SageMaker": {
                "PythonSDK": {
                    "Modules": {
                        "TelemetryOptOut": True,
                        "Session": {"DefaultS3Bucket": default_bucket(tenant)},
                    }
                }
            },
        },
        sort_keys=False,
    )


def sdk_environment(
    url: str, tenant: Tenant, key: AccessKey, *, config: Path, data_dir: Path
) -> dict[str, str]:
    """Variables by name."""
    return {
        "AWS_ACCESS_KEY_ID": key.spec.access_key_id,
        "AWS_SECRET_ACCESS_KEY": key.spec.secret_access_key,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "SAGEMAKER_TRAINING_SESSION_ENDPOINT": url,
        "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT": url,
        "AWS_ENDPOINT_URL_SAGEMAKER": url,
        "AWS_ENDPOINT_URL_S3": url,
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        "SAGEMAKER_ROLE_ARN": role_arn(tenant),
        # No machine role is to be looked for: there is none here.
        "AWS_EC2_METADATA_DISABLED": "true",
        # So that further commands find this instance.
        DATA_DIR_VARIABLE: str(data_dir),
    }


UNSET: Final = ("AWS_SESSION_TOKEN", "AWS_PROFILE")
"""What would be used beside our key, or before it."""


def shell_lines(environment: dict[str, str]) -> str:
    """Lines for `eval`."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*exports, f"unset {' '.join(UNSET)}"])

"""`gristmill keys`."""

from typing import Annotated, Any

import typer

from gristmill_cli.keys import create_key, list_keys, revoke_key
from gristmill_cli.options import DEFAULT_TENANT, DataDir, OutputOption, find_layout, open_store
from gristmill_cli.options import Tenant as TenantOption
from gristmill_cli.output import Output, print_data, print_table, reports_errors
from gristmill_cli.times import age, iso
from gristmill_contracts.credentials import AccessKey

app = typer.Typer(no_args_is_help=True, help="Access keys of tenants.")


@app.command()
@reports_errors
def create(
    data_dir: DataDir = None,
    tenant: TenantOption = DEFAULT_TENANT,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a key; a tenant that does not exist yet is made as well."""
    key = create_key(open_store(find_layout(data_dir)), tenant, description)
    shown = {**_row(key), "secretAccessKey": key.spec.secret_access_key}
    if output is not Output.TABLE:
        print_data(shown, output)
        return
    print_table(
        ("TENANT", "ACCESS KEY", "SECRET ACCESS KEY"),
        [(tenant, key.spec.access_key_id, key.spec.secret_access_key)],
    )


@app.command("list")
@reports_errors
def list_(
    data_dir: DataDir = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", "-t", help="Only of this tenant.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List keys, without their secrets."""
    keys = list_keys(open_store(find_layout(data_dir)), tenant)
    if output is not Output.TABLE:
        print_data([_row(key) for key in keys], output)
        return
    print_table(
        ("TENANT", "ACCESS KEY", "STATE", "AGE", "DESCRIPTION"),
        [
            (
                key.spec.tenant,
                key.spec.access_key_id,
                "revoked" if key.spec.revoked_us else "valid",
                age(key.metadata.creation_time_us),
                key.spec.description,
            )
            for key in keys
        ],
    )


@app.command()
@reports_errors
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ACCESS_KEY_ID")],
    data_dir: DataDir = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let no further request in that is signed with the key."""
    key = revoke_key(open_store(find_layout(data_dir)), key_id)
    if output is Output.TABLE:
        typer.echo(f"key {key_id} revoked")
    else:
        print_data(_row(key), output)


def _row(key: AccessKey) -> dict[str, Any]:  # Any: JSON
    return {
        "tenant": key.spec.tenant,
        "accessKeyId": key.spec.access_key_id,
        "description": key.spec.description,
        "created": iso(key.metadata.creation_time_us),
        "revoked": iso(key.spec.revoked_us),
    }

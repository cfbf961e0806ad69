"""`gristmill env`."""

import time
from typing import Final

import typer

from gristmill_cli.environment import sdk_environment, shell_lines, user_config
from gristmill_cli.errors import CommandError
from gristmill_cli.keys import valid_key
from gristmill_cli.local.instance import require_instance
from gristmill_cli.local.layout import write_private
from gristmill_cli.options import DEFAULT_TENANT, DataDir, OutputOption, find_layout, open_store
from gristmill_cli.options import Tenant as TenantOption
from gristmill_cli.output import Output, print_data, reports_errors
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.tenant import Tenant
from gristmill_sessions.port import ResourceStore

ACCOUNT_WAIT_S: Final = 10.0
POLL_S: Final = 0.05


@reports_errors
def env(
    data_dir: DataDir = None,
    tenant: TenantOption = DEFAULT_TENANT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print `export` lines for the SDKs: eval "$(gristmill env)"."""
    layout = find_layout(data_dir)
    instance = require_instance(layout)
    store = open_store(layout)
    owner = _with_account(store, tenant)
    key = valid_key(store, tenant)
    if key is None:
        raise CommandError(
            f"tenant {tenant!r} has no access key; make one with `gristmill keys create --tenant {tenant}`"
        )
    config = layout.user_config(tenant)
    write_private(config, user_config(owner).encode())
    environment = sdk_environment(instance.url, owner, key, config=config, data_dir=layout.root)
    if output is Output.TABLE:
        typer.echo(shell_lines(environment))
    else:
        print_data(environment, output)


def _with_account(store: ResourceStore, name: str) -> Tenant:
    """The tenant, once the running instance gave it an account. Raises CommandError."""
    deadline = time.monotonic() + ACCOUNT_WAIT_S
    while True:
        try:
            tenant = store.get(Tenant, "", name)
        except NotFoundError as error:
            raise CommandError(
                f"there is no tenant {name!r}; `gristmill keys create --tenant {name}` makes it"
            ) from error
        if tenant.status.account_id:
            return tenant
        if time.monotonic() > deadline:
            raise CommandError(
                f"tenant {name!r} has no account yet: the ledger does not answer; see `gristmill status`"
            )
        time.sleep(POLL_S)

"""The audit: exports page by page, signed heads, the key that verifies them."""

from functools import partial

from fastapi import APIRouter, Request, Response

from gristmill_contracts import limits
from gristmill_contracts.chain.export import MEDIA_TYPE
from gristmill_contracts.chain_http import NEXT_AFTER_HEADER, ChainKeys, ChainLengths, SignedNote
from gristmill_contracts.errors import InvalidRequestError, UnavailableError
from gristmill_contracts.units import now_us
from gristmill_ledger import checks
from gristmill_ledger.chain.exporting import export_page, export_start
from gristmill_ledger.chain.heads import Note, newest_notes, notes_after, sign_heads
from gristmill_ledger.chain.pages import chain_heads
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.routes.registries import read_parameters
from gristmill_ledger.wire import answer

router = APIRouter()


def _ledger(request: Request) -> Ledger:
    ledger: Ledger = request.app.state.ledger
    return ledger


@router.get("/v1/chain/export")
async def start_export(request: Request) -> Response:
    ledger = _ledger(request)
    read_parameters(request, ())
    body = await ledger.database.read(
        partial(export_start, keys=ledger.keeper.verifiers, now_us=now_us())
    )
    return Response(body, media_type=MEDIA_TYPE)


@router.get("/v1/chain/export/{tenant}")
async def get_page(request: Request, tenant: str) -> Response:
    given = read_parameters(request, ("after",))
    after = checks.whole_number("after", given.get("after", "0"))
    checks.text("tenant", tenant)
    page = await _ledger(request).database.read(partial(export_page, tenant=tenant, after=after))
    headers = {} if page.next_after is None else {NEXT_AFTER_HEADER: str(page.next_after)}
    return Response(page.body, headers=headers, media_type=MEDIA_TYPE)


@router.get("/v1/chain/lengths")
async def get_lengths(request: Request) -> Response:
    read_parameters(request, ())
    heads = await _ledger(request).database.read(chain_heads)
    return answer(ChainLengths(tenants={head.tenant: head.seq for head in heads}))


@router.get("/v1/chain/keys")
async def get_keys(request: Request) -> Response:
    return answer(ChainKeys(keys=[str(key) for key in _ledger(request).keeper.verifiers]))


@router.get("/v1/chain/heads/{tenant}")
async def get_heads(request: Request, tenant: str) -> Response:
    given = read_parameters(request, ("after",))
    after = checks.whole_number("after", given.get("after", "0"))
    checks.text("tenant", tenant)
    read = partial(notes_after, tenant=tenant, after=after, most=limits.CHAIN_PAGE_ROWS)
    return answer([_told(note) for note in await _ledger(request).database.read(read)])


@router.post("/v1/chain/heads/{tenant}")
async def post_head(request: Request, tenant: str) -> Response:
    """Sign the tenant's head as it is now; the newest signed head, if it has not moved since."""
    ledger = _ledger(request)
    checks.text("tenant", tenant)
    key = ledger.keeper.key
    if key is None:
        raise UnavailableError("this ledger has no key to sign heads with; set chain_key_file")
    at_us = now_us()
    signed = await ledger.database.write(
        partial(sign_heads, key=key, at_us=at_us, slot=f"at {at_us}", tenants=[tenant])
    )
    if not signed:
        signed = await ledger.database.read(partial(newest_notes, tenant=tenant))
    if not signed:
        raise InvalidRequestError(f"tenant {tenant!r} has no row yet; there is no head to sign")
    return answer(_told(signed[0]))


def _told(note: Note) -> SignedNote:
    return SignedNote(tenant=note.tenant, seq=note.seq, note=note.text)

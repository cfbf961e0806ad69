"""The routes that a FastAPI application answers, those of its routers among them."""

from fastapi import FastAPI
from fastapi.routing import APIRoute


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """(method, path) of each; paths with names in braces, without converters."""
    found = set()
    for each in app.routes:
        router = getattr(each, "original_router", None)
        for route in (each,) if router is None else router.routes:
            if isinstance(route, APIRoute):
                path = route.path.replace(":path}", "}")
                found |= {(method, path) for method in route.methods or ()}
    return found

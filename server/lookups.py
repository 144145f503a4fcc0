"""Layer sets over HTTP: one look-up, many at once, lists. The single look-up is the path that must be fast."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import JSONResponse, Response

from ..core.serialization import Record
from ..core.types import LayerSetList, ModelList
from ..store import Store
from .cache import Answer
from .cache import Query as Question
from .schemas import Batch, Depth, LookupAnswers, PlanAnswer, Word
from .state import Shared, engines_of

CACHE_CONTROL = "max-age=1"

router = APIRouter(prefix="/v1", tags=["layer sets"])

ModelQuery = Annotated[Word | None, Query(description="A name or fingerprint of a model.")]
TaskQuery = Annotated[Word | None, Query(description="A task.")]
Alias = Annotated[Word, Query(description="The name of the choice.")]
Device = Annotated[Word | None, Query(description="Prefer a set that was tuned on this device.")]
Dtype = Annotated[Word | None, Query(description="Prefer a set that was tuned in this dtype.")]
Version = Annotated[Depth | None, Query(description="This version, whatever the alias means.")]
# str, not a list: FastAPI would split nothing, and the header is one line
IfNoneMatch = Annotated[str | None, Header(description="ETags the caller has; 304 if one is still right.")]


def find_plan(store: Store, query: Question) -> dict[str, Any]:
    """The look-up's object.

    Raises: LayerSetNotFound: nothing fits; it names the nearest.
    """
    if query.version is None:
        found = store.lookup(query.model, query.task, query.device, query.dtype, query.alias)
    else:
        found = store.plan(query.model, query.task, query.version)
    alias = found.alias if query.version is None else None
    return PlanAnswer(found.plan, found.version, alias, found.fallback, query.model, query.task).to_json()


@router.get("/layer-sets/{model:path}/{task}", operation_id="layer_set", response_model=PlanAnswer)
async def layer_set(
    app: Shared,
    model: Annotated[Word, Path(description="Name or fingerprint, percent-encoded.")],
    task: Annotated[Word, Path(description="The task; it has no '/'.")],
    alias: Alias = "best",
    device: Device = None,
    dtype: Dtype = None,
    version: Version = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """How to decode this task with this model: the plan, and the layer set, heads or probe that its method needs.

    Falls back to another dtype or device, then to the task `default`; `fallback` says so in words.
    """
    began = time.perf_counter()
    answer = await app.answers.get(Question(model, task, alias, device, dtype, version))
    app.lookup_times.observe(time.perf_counter() - began)
    return _respond(answer, if_none_match)


def _respond(answer: Answer, if_none_match: str | None) -> Response:
    if answer.status != 200:
        return Response(answer.body, answer.status, media_type=answer.media_type)
    headers = {"ETag": answer.etag, "Cache-Control": CACHE_CONTROL}
    if if_none_match is not None:
        known = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
        if answer.etag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
    return Response(answer.body, 200, headers, answer.media_type)


@router.post("/layer-sets:lookup", operation_id="lookup", response_model=LookupAnswers)
async def lookup(app: Shared, body: Batch) -> Response:
    """Up to 1000 look-ups at once; each gets its plan or its own problem object, in the same order."""
    questions = [Question(**query.model_dump()) for query in body.queries]
    answers = await asyncio.gather(*(app.answers.get(question) for question in questions))
    joined = b",".join(answer.body for answer in answers)
    return Response(b'{"schema": "swiftopt.lookup/1", "answers": [' + joined + b"]}", media_type="application/json")


@router.get("/layer-sets", operation_id="layer_sets", response_model=LayerSetList)
def layer_sets(app: Shared, model: ModelQuery = None, task: TaskQuery = None) -> Response:
    """The stored versions of a model, a task, both or all, newest first."""
    return _json(LayerSetList(tuple(app.store.layer_sets(model, task))))


@router.get("/models", operation_id="models", response_model=ModelList)
def models(app: Shared) -> Response:
    """OpenAI's list of the models that are served; beside it those that were loaded once, and names look-ups know."""
    known = ModelList(tuple(app.store.models()), tuple(app.store.model_names())).to_json()
    served = [] if app.engines is None else [engine.card() for engine in app.engines.of.values()]
    return JSONResponse({**known, "object": "list", "data": served})


@router.get("/models/{model:path}", operation_id="model", response_class=Response)
def model(app: Shared, model: Annotated[Word, Path(description="A model that is served.")]) -> Response:
    """One model that is served, in OpenAI's form."""
    return JSONResponse(engines_of(app).find(model).card())


def _json(record: Record) -> Response:
    return Response(json.dumps(record.to_json()), media_type="application/json")

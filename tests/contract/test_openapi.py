"""The OpenAPI document is a promise: it changes only together with its snapshot, and the app keeps to it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import pytest
from api import client_of, filled, submission
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from pages import API, RENEW, SNAPSHOT, api_page

from swiftopt.core.requests import VERBS
from swiftopt.server.openapi import bare_app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

N_EXAMPLES = 10  # per operation and kind


def test_document_is_the_snapshot() -> None:
    assert bare_app().openapi() == json.loads(SNAPSHOT.read_text(encoding="utf-8")), RENEW


def test_page_is_made_of_the_document() -> None:
    assert API.read_text(encoding="utf-8") == api_page(bare_app().openapi()), RENEW


def test_every_operation_has_a_name_and_words() -> None:
    operations = [found for path in bare_app().openapi()["paths"].values() for found in path.values()]
    assert len({found["operationId"] for found in operations}) == len(operations) > 14
    assert all(found["description"] and "4XX" in found["responses"] for found in operations)


def test_verbs_of_the_document_are_the_jobs() -> None:
    steer = bare_app().openapi()["paths"]["/v1/jobs/{job}/{verb}"]["post"]
    verb = next(parameter for parameter in steer["parameters"] if parameter["name"] == "verb")
    assert tuple(verb["schema"]["enum"]) == VERBS


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    """The app's schema over a store with a layer set and a job, without keys and rate limit."""
    with filled(str(tmp_path_factory.mktemp("api") / "swiftopt.db")) as store:
        client = client_of(store)
        client.post("/v1/jobs", json=submission())
        found = schemathesis.openapi.from_asgi("/openapi.json", client.app)
        # Ranges and the stream's lines are checked by the core, in sentences; the document cannot say all of that.
        found.config.checks.positive_data_acceptance.expected_statuses = [
            "2xx",
            "304",
            "400",
            "401",
            "404",
            "409",
            "422",
        ]
        yield found


OPERATIONS = [(method, path) for path, found in bare_app().openapi()["paths"].items() for method in found]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[" ".join(pair) for pair in OPERATIONS])
def test_app_keeps_to_its_document(schema: schemathesis.BaseSchema, method: str, path: str) -> None:
    """Every check that schemathesis has, with valid and with invalid requests; endless events are read as a page."""
    operation = schema[path][method]
    for mode in GenerationMode:

        @given(operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=N_EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: schemathesis.Case) -> None:
            if path.endswith("/events"):
                case.query = {**(case.query or {}), "format": "json"}
            case.call_and_validate(checks=[CHECKS.get_one(name) for name in CHECKS.get_all_names()])

        try:
            holds()
        except Unsatisfiable:  # nothing about this operation can be wrong
            assert mode.is_negative

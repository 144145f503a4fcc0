"""The store: one object per database whose methods are the functions of this folder, each run in a transaction."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from . import jobs, names, plan_lists, plans, results, served_trials, transitions, usage
from .database import Transactions, as_url, default_url, without_password
from .migrations import SchemaState, connect_at_head, revision

P = ParamSpec("P")
T = TypeVar("T")

LEASE_S = 20.0  # Default seconds without a renewal after which an attempt counts as lost.
# Bytes written by `check_writable`: eight pages of SQLite, so that a full disk is noticed.
PROBE_BYTES = 1 << 15


def reads(query: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Transactions, P], T]:
    """Wrap a read-only function of a session as a method that runs it in a transaction."""

    @wraps(query)
    def method(self: Transactions, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.read(lambda session: query(session, *args, **kwargs))

    return method


def writes(transaction: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Transactions, P], T]:
    """Wrap a function of a session that writes as a method that runs it in one transaction."""

    @wraps(transaction)
    def method(self: Transactions, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.write(lambda session: transaction(session, *args, **kwargs))

    return method


def renews(transaction: Callable[Concatenate[Session, float, P], T]) -> Callable[Concatenate[Jobs, P], T]:
    """Wrap a function that writes for an attempt as a method that also renews its lease, for `lease_s` seconds."""

    @wraps(transaction)
    def method(self: Jobs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.write(lambda session: transaction(session, self.lease_s, *args, **kwargs))

    return method


class Jobs(Transactions):
    """Jobs, their events, completions and counters; every write of an attempt is fenced by its lease.

    `lease_s`: seconds without a renewal after which an attempt counts as lost.
    """

    lease_s = LEASE_S

    # Methods for the API and commands.
    submit = writes(transitions.submit)
    act = writes(transitions.act)
    get = reads(jobs.get)
    latest = reads(jobs.latest)
    events = reads(jobs.events)
    newest_events = reads(jobs.newest_events)
    standings = reads(jobs.standings)
    outputs = reads(jobs.outputs)
    evidence = reads(jobs.evidence)
    save_stream = writes(jobs.save_stream)
    stream = reads(jobs.stream)
    counts = reads(jobs.counts)
    states = reads(jobs.states)

    # Methods for the delivery of jobs to workers.
    due = reads(transitions.due)
    due_tunings = reads(transitions.due_tunings)
    redeliver = writes(transitions.redeliver)
    lock = writes(transitions.take_lock)
    locks = reads(transitions.held_locks)
    _expired = reads(transitions.expired)
    _expire = writes(transitions.expire)

    def expire(self) -> list[transitions.LostAttempt]:
        """End every attempt whose lease expired: its job is queued again, or fails."""
        return [lost_attempt for lease, worker in self._expired() if (lost_attempt := self._expire(lease, worker))]

    # Methods for a worker that runs an attempt.
    begin_here = renews(transitions.begin_here)
    claim = renews(transitions.claim)
    renew = renews(jobs.renew)
    peek = reads(jobs.peek)
    checkpoint = renews(jobs.checkpoint)
    finish_task = renews(jobs.finish_task)
    hand_back = writes(transitions.hand_back)
    end = writes(transitions.end)
    attempt_failed = writes(transitions.attempt_failed)


class Store(Transactions):
    """Layer sets, heads and probes, plans, aliases, comparisons, cost profiles, jobs and trials in one SQL database."""

    def __init__(self, engine: Engine, url: str) -> None:
        super().__init__(engine, url)
        self.jobs = Jobs(engine, url)

    @classmethod
    def open(cls, url: str | Path | None = None) -> Store:
        """Open the database (a URL or a path; None: the default one), created and migrated as needed.

        Raises: SchemaTooNew: a newer swiftopt has written it. StoreError: it cannot be opened.
        """
        url = default_url() if url is None else as_url(url)
        return cls(connect_at_head(url), url)

    def schema(self) -> SchemaState:
        """Return the database's schema, read over an open connection."""
        return self.read(lambda session: SchemaState(without_password(self.url), revision(session.connection())))

    def check_writable(self) -> None:
        """Check that the database can be written, with a write large enough to make its file grow.

        Raises: StoreError: it cannot be written.
        """
        for owner in ("x" * PROBE_BYTES, "nobody"):
            self.jobs.lock("probe", owner, 0.0)

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    remember_model = writes(names.remember)
    models = reads(names.list_models)
    model_names = reads(names.list_names)

    add_layer_set = writes(plans.add_layer_set)
    layer_set = reads(plans.layer_set_of)
    layer_sets = reads(plans.list_layer_sets)
    known_sets = reads(plans.known_sets)

    add_plan = writes(plans.add_plan)
    plan = reads(plans.get_plan)
    plan_versions = reads(plan_lists.plan_versions)
    plan_page = reads(plan_lists.plan_page)
    alias_moves = reads(plans.alias_moves)
    lookup = reads(plans.lookup)
    lookup_many = reads(plans.lookup_many)
    lookup_state = reads(plans.lookup_state)
    lookup_states = reads(plans.lookup_states)
    tasks_moved = reads(plans.tasks_moved)
    promote = writes(plans.promote)
    rollback = writes(plans.rollback)

    add_learned = writes(results.add_learned)
    learned = reads(results.find_learned)
    learned_list = reads(results.list_learned)
    weights = reads(results.weights_of)

    add_comparison = writes(results.add_comparison)
    comparisons = reads(results.list_comparisons)
    save_cost_profile = writes(results.save_cost_profile)
    cost_profile = reads(results.find_cost_profile)
    cost_profiles = reads(results.list_cost_profiles)
    trials = reads(results.list_trials)
    tried = reads(results.list_tried)
    searches = reads(results.list_searches)
    add_served_trials = writes(served_trials.add_served_trials)
    served_searches = reads(served_trials.list_served_searches)
    served_tried = reads(served_trials.list_served_tried)
    fingerprint_of_search = reads(served_trials.fingerprint_of_search)

    add_usage = writes(usage.add_usage)
    usage_since = reads(usage.usage_since)

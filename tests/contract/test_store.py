"""The laws of the store, for every database that it runs on."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from fakes import flat_costs
from job_table import finished, running

from swiftopt.core.costs import CostProfile, FormatCosts
from swiftopt.core.errors import InvalidInput, LayerSetError, LayerSetNotFound, StoreError
from swiftopt.core.events import TrialsDone
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import KnownSet, LayerSetRecord, ModelInfo, pack_state, unpack_state
from swiftopt.core.requests import JobSpec
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt, Trial
from swiftopt.store import Store

MODEL = ModelInfo("f" * 16, "LlamaForCausalLM", 40, 13_015_864_320, ("codellama-13b", "codellama/CodeLlama-13b-hf"))
H200, A100 = "NVIDIA H200", "NVIDIA A100"


def record(
    *skip_mlp: int, model: str = "codellama-13b", task: str = "humaneval", fingerprint: str | None = MODEL.fingerprint
) -> LayerSetRecord:
    layer_set = LayerSet(MODEL.n_layers, frozenset({7, 10}), frozenset(skip_mlp or (7, 8)))
    return LayerSetRecord(
        model=model, task=task, layer_set=layer_set, fingerprint=fingerprint, device=H200, dtype="bfloat16"
    )


def imported(*skip_mlp: int, model: str = "codellama-13b", task: str = "humaneval") -> LayerSetRecord:
    stored = record(*skip_mlp, model=model, task=task, fingerprint=None)
    return dataclasses.replace(stored, device=None, dtype=None)


FORMATS: tuple[tuple[tuple[str, str], ...], ...] = ((), (("head", "int8"), ("mlp:3", "int4")))


def trial(step: int) -> Trial:
    return Trial(
        step,
        LayerSet(40, frozenset({step + 1}), frozenset({3}), FORMATS[step % 2]),
        "random",
        0.1 + step / 7,
        1 / 3,
        "p",
        9,
        2**40,
    )


# --- layer sets -------------------------------------------------------------------------------------------------------


def test_store_returns_every_field_of_a_record_as_it_was_written(store: Store) -> None:
    job = store.jobs.begin_here(JobSpec("tune", None), "here").job.id
    full = dataclasses.replace(
        record(),
        layer_set=dataclasses.replace(record().layer_set, formats=FORMATS[1]),
        matchness=0.97,
        acceptance_rate=1 / 3,
        mean_generated_length=4.2,
        expected_speedup=1.52,
        measured_speedup=1.44,
        measured_interval=(1.39, 1.49),
        verdict="use",
        settings=SwiftSettings(seed=3).to_json(),
        stream_sha256="ab",
        swiftopt_version="0.1.0",
        created_at="2026-11-21T00:00:00Z",
        job=job,
    )
    stored = store.add_layer_set(full)
    assert stored == dataclasses.replace(full, version=1)
    assert store.layer_set("codellama-13b", "humaneval", 1) == stored
    plan = store.lookup("codellama-13b", "humaneval").plan
    assert (plan.method, plan.layer_set, plan.settings, plan.verdict) == ("swift", stored, full.settings, "use")


def test_layer_set_is_dated_in_utc_when_the_record_has_no_time(store: Store) -> None:
    assert store.add_layer_set(record()).created_at.endswith("Z")


def test_adding_again_makes_a_new_version_and_leaves_the_old_one(store: Store) -> None:
    first = store.add_layer_set(record(7))
    assert store.add_layer_set(record(8)).version == 2
    assert store.layer_set("codellama-13b", "humaneval", 1) == first


def test_versions_count_per_model_and_task(store: Store) -> None:
    added = [record(), record(task="gsm8k"), record(model="other", fingerprint="e"), record()]
    assert [store.add_layer_set(one).version for one in added] == [1, 1, 1, 2]


def test_layer_sets_are_listed_newest_first_and_by_model_and_task(store: Store) -> None:
    for one in (record(), record(task="gsm8k"), record(model="other", fingerprint="e"), record()):
        store.add_layer_set(one)
    listed = [(one.model, one.task, one.version) for one in store.layer_sets()]
    assert listed == [
        ("codellama-13b", "humaneval", 2),
        ("other", "humaneval", 1),
        ("codellama-13b", "gsm8k", 1),
        ("codellama-13b", "humaneval", 1),
    ]
    assert [one.version for one in store.layer_sets(MODEL.fingerprint, "humaneval")] == [2, 1]
    assert len(store.layer_sets(task="humaneval")) == 3
    assert store.layer_sets("unknown") == []


LONG = "".join(map(chr, range(0x4E00, 0x5600)))  # 6 kB that nothing makes shorter


@pytest.mark.parametrize(("bad", "refusing"), [("\udcff", "sqlite postgresql"), ("\0", "postgresql")], ids=ascii)
def test_text_that_the_database_does_not_take_is_refused_as_input(store: Store, bad: str, refusing: str) -> None:
    refused = pytest.raises(InvalidInput, match=r"cannot be stored or looked up .*: remove NUL")
    found = refused if store.engine.dialect.name in refusing else pytest.raises(LayerSetNotFound)
    with found:
        store.lookup(bad, "t")
    with refused if store.engine.dialect.name in refusing else nullcontext():
        store.add_layer_set(record(task=bad))


def test_names_and_numbers_beyond_what_the_database_holds_are_refused_as_input(store: Store) -> None:
    long = dataclasses.replace(finished(), prompt=Prompt(LONG, "t"))
    with pytest.raises(InvalidInput, match="use shorter names and smaller numbers"):
        store.plan(MODEL.names[0], "t", 2**70)
    if store.engine.dialect.name == "postgresql":
        with pytest.raises(InvalidInput, match=r"index row size .*use shorter names"):
            store.jobs.checkpoint(running(store.jobs), 1, [long], {})


def test_missing_version_is_answered_with_those_that_exist(store: Store) -> None:
    store.add_layer_set(record())
    store.add_layer_set(record())
    with pytest.raises(LayerSetNotFound, match=r"no version 7: stored are 1, 2"):
        store.layer_set("codellama-13b", "humaneval", 7)
    with pytest.raises(LayerSetNotFound, match=r"stored are 1, 2"):
        store.promote("codellama-13b", "humaneval", 7)


@pytest.mark.parametrize("fingerprint", [None, MODEL.fingerprint, "of a model not seen yet"])
def test_layer_set_is_refused_when_its_depth_is_not_the_models(store: Store, fingerprint: str | None) -> None:
    store.remember_model(MODEL)
    shallow = dataclasses.replace(record(), layer_set=LayerSet(32), fingerprint=fingerprint)
    with pytest.raises(LayerSetError, match="for 32 layers, but codellama-13b has 40"):
        store.add_layer_set(shallow)
    assert store.layer_sets() == []


def test_layer_set_of_an_unknown_job_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no job 0123 is stored"):
        store.add_layer_set(dataclasses.replace(record(), job="0123"))


def test_known_sets_are_those_of_the_model_with_a_state_newest_first(store: Store) -> None:
    near, far = unpack_state(pack_state((0.6, 0.8))), (1.0, 0.0)
    store.add_layer_set(record(1, task="code"))
    older = store.add_layer_set(dataclasses.replace(record(2, task="prose"), prompt_state=far))
    newer = store.add_layer_set(dataclasses.replace(record(3, task="code"), prompt_state=near))
    other = record(4, model="other-model", fingerprint="v1:other")
    store.add_layer_set(dataclasses.replace(other, prompt_state=near))
    assert store.known_sets(str(MODEL.fingerprint)) == [
        KnownSet(newer.layer_set, near, "code"),
        KnownSet(older.layer_set, far, "prose"),
    ]
    assert store.known_sets("v1:none") == []
    assert store.layer_sets()[0].prompt_state is None  # lists do not read it


def test_evidence_is_kept_as_it_was(store: Store) -> None:
    """It is no part of the object that is exchanged."""
    own = dataclasses.replace(record(1), evidence=((64, 0.8, 64, 0.5), (32, 0.4, 30, 0.35)))
    stored = store.add_layer_set(own)
    assert stored.evidence == store.layer_sets()[0].evidence == own.evidence
    assert "evidence" not in stored.to_json()


def test_versions_are_distinct_when_two_stores_write_at_once(database_url: str) -> None:
    def add(_: int) -> list[int | None]:
        with Store.open(database_url) as mine:
            return [mine.add_layer_set(record()).version for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        versions = [version for some in pool.map(add, range(2)) for version in some]
    assert sorted(versions, key=str) == sorted(range(1, 21), key=str)


# --- models and names -------------------------------------------------------------------------------------------------


def test_model_is_found_by_each_name_and_its_fingerprint(store: Store) -> None:
    store.remember_model(MODEL)
    stored = store.add_layer_set(record())
    assert store.models() == [MODEL]
    assert store.model_names() == ["codellama-13b", "codellama/CodeLlama-13b-hf"]
    for name in (*MODEL.names, MODEL.fingerprint):
        assert store.lookup(name, "humaneval").plan.layer_set == stored


def test_remembering_again_updates_the_model_and_keeps_its_names(store: Store) -> None:
    store.remember_model(dataclasses.replace(MODEL, architecture="", n_parameters=0, names=("a",)))
    store.remember_model(MODEL)
    assert store.models() == [dataclasses.replace(MODEL, names=("a", *MODEL.names))]


def test_name_moves_to_the_newest_fingerprint_and_old_sets_stay_with_theirs(store: Store) -> None:
    store.remember_model(MODEL)
    store.add_layer_set(record())
    store.remember_model(dataclasses.replace(MODEL, fingerprint="new", names=("codellama-13b",)))
    with pytest.raises(LayerSetNotFound):
        store.lookup("codellama-13b", "humaneval")
    assert store.lookup(MODEL.fingerprint, "humaneval").version == 1


def test_fingerprint_decides_when_the_name_has_moved_on(store: Store) -> None:
    store.remember_model(MODEL)
    store.remember_model(dataclasses.replace(MODEL, fingerprint="new"))
    store.add_layer_set(record())
    assert [one.fingerprint for one in store.layer_sets(MODEL.fingerprint)] == [MODEL.fingerprint]
    assert store.layer_sets("codellama-13b") == []


def test_imported_set_is_adopted_when_its_model_is_first_loaded(store: Store) -> None:
    store.add_layer_set(imported())
    assert (store.models(), store.model_names()) == ([], ["codellama-13b"])
    store.remember_model(MODEL)
    found = store.lookup(MODEL.fingerprint, "humaneval").plan.layer_set
    assert found is not None
    assert (found.version, found.fingerprint) == (1, MODEL.fingerprint)
    assert store.models() == [MODEL]


def test_imported_set_follows_the_models_own_when_it_is_adopted_later(store: Store) -> None:
    store.remember_model(dataclasses.replace(MODEL, names=("local folder",)))
    own = store.add_layer_set(record(7, model="local folder"))
    for one in (imported(8), imported(9), imported(8, task="gsm8k")):
        store.add_layer_set(one)
    store.remember_model(MODEL)
    assert store.layer_set("codellama-13b", "humaneval", 1) == own
    skipped = [set(store.layer_set("local folder", "humaneval", v).layer_set.skip_mlp) for v in (2, 3)]
    assert skipped == [{8}, {9}]
    assert [one.version for one in store.layer_sets(MODEL.fingerprint, "gsm8k")] == [1]
    assert store.lookup("local folder", "humaneval").version == 3
    assert store.rollback("local folder", "humaneval").version == 2


def test_imported_set_of_another_depth_is_not_adopted(store: Store) -> None:
    store.add_layer_set(dataclasses.replace(imported(), layer_set=LayerSet(32)))
    store.remember_model(MODEL)
    assert store.layer_sets("codellama-13b") == []
    assert [one.fingerprint for one in store.layer_sets()] == [None]


def test_loaded_model_wins_over_a_file_that_gave_its_fingerprint_another_depth(store: Store) -> None:
    store.add_layer_set(dataclasses.replace(record(), layer_set=LayerSet(32)))
    store.remember_model(MODEL)
    assert store.models() == [MODEL]
    assert store.layer_sets(MODEL.fingerprint) == []


# --- aliases and lookups ---------------------------------------------------------------------------------------------


def test_lookup_is_exact_when_model_task_device_and_dtype_agree(store: Store) -> None:
    for device, dtype in ((H200, "bfloat16"), (H200, "float16"), (A100, "bfloat16")):
        store.add_layer_set(dataclasses.replace(record(), device=device, dtype=dtype))
    found = store.lookup("codellama-13b", "humaneval", H200, "bfloat16")
    assert (found.version, found.fallback, found.alias) == (1, None, "best")
    assert store.lookup("codellama-13b", "humaneval", H200).version == 2
    assert store.lookup("codellama-13b", "humaneval").version == 3


@pytest.mark.parametrize(
    ("device", "dtype", "version", "fallback"),
    [
        (H200, "float32", 1, f"tuned on {H200} bfloat16"),
        ("cpu", "float16", 2, f"tuned on {A100} float16"),
        ("cpu", "float32", 2, f"tuned on {A100} float16"),
        ("cpu", None, 2, f"tuned on {A100} float16"),
    ],
)
def test_lookup_falls_back_to_the_nearest_other_hardware_and_says_so(
    store: Store, device: str, dtype: str | None, version: int, fallback: str
) -> None:
    store.add_layer_set(record())
    store.add_layer_set(dataclasses.replace(record(), device=A100, dtype="float16"))
    found = store.lookup("codellama-13b", "humaneval", device, dtype)
    assert (found.version, found.fallback) == (version, fallback)


def test_lookup_says_that_an_imported_set_was_tuned_on_an_unknown_device(store: Store) -> None:
    store.add_layer_set(imported())
    assert store.lookup("codellama-13b", "humaneval", H200, "bfloat16").fallback == "tuned on an unknown device"


def test_lookup_falls_back_to_the_models_default_task(store: Store) -> None:
    store.add_layer_set(record(task="default"))
    assert store.lookup("codellama-13b", "poems", H200, "bfloat16").fallback == "model default"
    assert store.lookup("codellama-13b", "poems", A100).fallback == f"model default, tuned on {H200} bfloat16"
    assert store.lookup("codellama-13b", "default").fallback is None


def test_many_tasks_are_looked_up_at_once_as_each_alone(store: Store) -> None:
    for task in ("poems", "prose", "default"):
        store.add_layer_set(record(task=task))
    store.add_layer_set(dataclasses.replace(record(task="poems"), device=A100))
    asked = ["poems", "prose", "letters", "poems"]
    for where in ((None, None), (H200, "bfloat16"), (A100, None), ("cpu", "float32")):
        found = store.lookup_many("codellama-13b", asked, *where)
        assert found == {task: store.lookup("codellama-13b", task, *where) for task in asked}
        assert found["letters"].fallback is not None
    store.rollback("codellama-13b", "poems")
    assert store.lookup_many("codellama-13b", asked)["poems"] == store.lookup("codellama-13b", "poems")
    assert store.lookup_many("codellama-13b", asked, alias="vllm") == store.lookup_many("none", asked) == {}


def test_state_of_a_model_changes_with_its_moves_and_its_name_alone(store: Store) -> None:
    assert store.lookup_state("codellama-13b") is None
    first = store.add_layer_set(record())
    state = store.lookup_state("codellama-13b")
    store.add_layer_set(record(model="qwen", fingerprint="e"))
    store.add_layer_set(record(), promote=False)
    assert store.lookup_state("codellama-13b") == store.lookup_state(MODEL.fingerprint) == state is not None
    store.promote("codellama-13b", first.task, 2)
    moved = store.lookup_state("codellama-13b")
    store.rollback("codellama-13b", first.task)
    assert len({state, moved, store.lookup_state("codellama-13b")}) == 3
    store.remember_model(dataclasses.replace(MODEL, fingerprint="e", names=("qwen", "codellama-13b")))
    assert store.lookup_state("codellama-13b") == store.lookup_state("qwen")


def test_lookup_names_the_nearest_and_the_command_when_nothing_fits(store: Store) -> None:
    with pytest.raises(LayerSetNotFound, match=r"no layer set is stored for codelama-13b/humaneval: run"):
        store.lookup("codelama-13b", "humaneval")
    store.add_layer_set(record())
    store.add_layer_set(record(model="qwen", task="gsm8k", fingerprint="e"))
    with pytest.raises(LayerSetNotFound) as caught:
        store.lookup("codelama-13b", "humaneval")
    assert "the nearest is codellama-13b/humaneval" in str(caught.value)
    assert "`swiftopt tune --model codelama-13b --stream FILE --task humaneval`" in str(caught.value)
    with pytest.raises(LayerSetNotFound, match="the nearest is qwen/gsm8k"):
        store.lookup("qwen", "gsm")
    with pytest.raises(LayerSetNotFound, match="tune --model '/my models/a' --stream FILE --task 'it is'`"):
        store.lookup("/my models/a", "it is")


def test_set_that_was_not_promoted_is_stored_but_not_looked_up(store: Store) -> None:
    store.add_layer_set(record(), promote=False)
    with pytest.raises(LayerSetNotFound, match=r"alias 'best': promote one of its versions 1"):
        store.lookup("codellama-13b", "humaneval")
    assert store.promote("codellama-13b", "humaneval", 1) == store.lookup("codellama-13b", "humaneval")


def test_aliases_move_independently(store: Store) -> None:
    store.add_layer_set(record())
    store.add_layer_set(record())
    store.promote("codellama-13b", "humaneval", 1, alias="stable")
    assert store.lookup("codellama-13b", "humaneval", alias="stable").version == 1
    assert store.lookup("codellama-13b", "humaneval").version == 2
    with pytest.raises(LayerSetNotFound, match="the first it had"):
        store.rollback("codellama-13b", "humaneval", alias="stable")


def test_rollback_goes_back_one_move_each_time_until_the_first(store: Store) -> None:
    for _ in range(3):
        store.add_layer_set(record())
    for version in (2, 1):
        found = store.rollback("codellama-13b", "humaneval")
        assert found.version == version
        assert store.lookup("codellama-13b", "humaneval", H200, "bfloat16") == found
    with pytest.raises(LayerSetNotFound, match="version 1 is the first it had"):
        store.rollback("codellama-13b", "humaneval")
    assert store.lookup("codellama-13b", "humaneval").version == 1


def test_rollback_after_a_rollback_and_a_promotion_undoes_the_promotion(store: Store) -> None:
    for _ in range(3):
        store.add_layer_set(record())
    store.rollback("codellama-13b", "humaneval")
    store.promote("codellama-13b", "humaneval", 1)
    assert store.rollback("codellama-13b", "humaneval").version == 2


def test_promoting_what_is_already_best_leaves_nothing_to_roll_back(store: Store) -> None:
    store.add_layer_set(record())
    store.promote("codellama-13b", "humaneval", 1)
    with pytest.raises(LayerSetNotFound):
        store.rollback("codellama-13b", "humaneval")


def test_rollback_of_one_device_leaves_the_others_plan(store: Store) -> None:
    store.add_layer_set(record())
    store.add_layer_set(dataclasses.replace(record(), device=A100))
    assert store.rollback("codellama-13b", "humaneval").version == 1
    assert store.lookup("codellama-13b", "humaneval", H200, "bfloat16").fallback is None
    assert store.lookup("codellama-13b", "humaneval", A100).fallback == f"tuned on {H200} bfloat16"


@pytest.mark.parametrize("model", ["unknown", "codellama-13b"])
def test_rollback_is_refused_when_nothing_is_stored(store: Store, model: str) -> None:
    store.remember_model(MODEL)
    with pytest.raises(LayerSetNotFound, match=f"no layer set is stored for {model}/t"):
        store.rollback(model, "t")


def test_set_that_was_found_for_adaptive_drafts_is_planned_so(store: Store) -> None:
    kept = store.add_layer_set(
        dataclasses.replace(imported(3), settings={"method": "adaptive", "draft_format": "int4"})
    )
    assert kept.version is not None
    plan = store.plan(kept.model, kept.task, kept.version).plan
    assert (plan.method, plan.settings) == ("adaptive", {"draft_format": "stored"})


# --- cost profiles, jobs, trials --------------------------------------------------------------------------------------


def test_cost_profile_is_replaced_by_a_newer_one_of_the_same_key(store: Store) -> None:
    profile = CostProfile(
        "f",
        H200,
        "bfloat16",
        2048,
        40,
        1e-5,
        8e-5,
        1e-4,
        1e-5,
        {1: 0.004, 2: 0.0041, 16: 0.005},
        {"int4": FormatCosts(1e-6, 2e-6, 3e-6, 4e-6, {1: 1.0, 4: 1.5})},
        absent=("mlp:3",),
    )
    assert store.cost_profile("f", H200, "bfloat16", 2048) is None
    store.save_cost_profile(profile)
    longer = dataclasses.replace(profile, context_bucket=4096)
    store.save_cost_profile(longer)
    assert store.cost_profile("f", H200, "bfloat16", 4096) == longer
    newer = dataclasses.replace(profile, pass_s={1: 1 / 3})
    store.save_cost_profile(newer)
    assert store.cost_profile("f", H200, "bfloat16", 2048) == newer
    assert store.cost_profile("f", A100, "bfloat16", 2048) is None
    assert store.cost_profiles("f") == [newer, longer] and store.cost_profiles("g") == []
    assert store.cost_profiles() == [newer, longer], "of all models"


def test_cost_profile_stays_when_a_disturbed_one_of_the_same_software_comes(store: Store) -> None:
    quiet = dataclasses.replace(flat_costs(), fingerprint="f", software="torch 1")
    key = ("f", quiet.device, quiet.dtype, quiet.context_bucket)
    disturbed = dataclasses.replace(quiet, pass_s={1: 99.0}, quality="disturbed", remark="others had 40 %")
    store.save_cost_profile(disturbed)
    assert store.cost_profile(*key) == disturbed
    for better in (quiet, dataclasses.replace(quiet, quality="refined", remark="900 passes of decoding")):
        store.save_cost_profile(better)
        store.save_cost_profile(disturbed)
        assert store.cost_profile(*key) == better
    other = dataclasses.replace(disturbed, software="torch 2")
    store.save_cost_profile(other)
    assert store.cost_profile(*key) == other


def test_trials_come_back_in_step_order_and_unchanged(store: Store) -> None:
    jobs = store.jobs
    mine, other = (jobs.begin_here(JobSpec("tune", None), "here").lease for _ in range(2))
    adopted = dataclasses.replace(trial(1), adopted=True, seconds=0.25)
    jobs.checkpoint(mine, 1, [TrialsDone("a", (trial(2), trial(0))), TrialsDone("b", (trial(5),))], None)
    jobs.checkpoint(mine, 2, [TrialsDone("a", (adopted,)), TrialsDone("c", ())], None)
    jobs.checkpoint(other, 1, [TrialsDone("a", (trial(6),))], None)
    assert store.trials(mine.job, "a") == [trial(0), adopted, trial(2)]
    assert store.trials(mine.job, "c") == []


def test_figures_of_trials_are_read_without_their_sets_and_summed_up_per_search(store: Store) -> None:
    lease, other = (store.jobs.begin_here(JobSpec("tune", None), "here").lease for _ in range(2))
    same = dataclasses.replace(trial(1), step=3, score=2.5, adopted=True)
    stored = [trial(0), trial(1), same]
    store.jobs.checkpoint(lease, 1, [TrialsDone("a", tuple(stored)), TrialsDone("b", (trial(5),))], None)
    store.jobs.checkpoint(other, 1, [TrialsDone("a", (trial(6),))], None)
    tried = store.tried(lease.job, "a")
    for name in ("step", "origin", "matchness", "score", "adopted", "seconds", "layer_set"):
        assert [getattr(each, name) for each in tried] == [getattr(each, name) for each in stored]
    assert tried[1].key == tried[2].key != tried[0].key
    sums = {(each.job, each.task): (each.n_trials, each.best_score) for each in store.searches()}
    assert sums == {(lease.job, "a"): (3, 2.5), (lease.job, "b"): (1, 1 / 3), (other.job, "a"): (1, 1 / 3)}
    assert [each.task for each in store.searches(lease.job)] == ["a", "b"] and store.searches("none") == []


def test_local_job_has_an_id_of_12_hexadecimal_digits_and_its_first_end_stands(store: Store) -> None:
    lease = store.jobs.begin_here(JobSpec("tune", None), "here").lease
    assert len(lease.job) == 12 and int(lease.job, 16) >= 0
    assert store.jobs.get(lease.job).state == "running"
    assert store.jobs.end(lease, "cancelled")
    assert not store.jobs.end(lease, "succeeded")
    assert store.jobs.get(lease.job).state == "cancelled"

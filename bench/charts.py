"""Draws the pictures of benchmarks."""

from __future__ import annotations

from itertools import accumulate
from statistics import mean

from ..terminal.charts import (
    BESIDE,
    BLUE,
    CYCLE,
    DASHED,
    GREY,
    INK,
    LIGHT_BLUE,
    LINE,
    MEAN_OF,
    ORANGE,
    Pictures,
    Report,
    conditions,
    draw_speeds,
    end_at_one,
    legend,
    log_axis,
    model_name,
    moving_means,
    picture,
)

SHIFT_RUNS = (
    ("kept", "first task's set", GREY),
    ("own", "each task's own set", BLUE),
    ("adapted", "one stream, adapting", ORANGE),
)


def draw_search(report: Report, pictures: Pictures) -> None:
    """Plot the objective of search strategies over passes and over seconds."""
    title = f"{model_name(report['model'])} · {conditions(report)} · {report['windows']} windows"
    with picture(pictures, 4.6, title, ncols=2, sharey=True) as (pass_axes, second_axes):
        for column, (axes, total_key) in enumerate(((pass_axes, "passes"), (second_axes, "seconds"))):
            for colour, result in zip(CYCLE * len(report["results"]), report["results"], strict=False):
                x = [*(point[column] for point in result["curve"]), result[total_key]]
                y = [*(point[2] for point in result["curve"]), result["final"]]
                axes.step(x, y, where="post", color=colour, label=result["strategy"])
            axes.axhline(report["goal"], color=INK, lw=1, ls=DASHED)
            axes.set_title(f"dashed: {report['goal']:.3f}x, 95 % of the best")
        pass_axes.set(xlabel="candidate passes", ylabel="expected speedup of the set in use")
        second_axes.set(xlabel="seconds of searching")
        legend(second_axes)


def draw_tunings(report: Report, pictures: Pictures) -> None:
    """Plot each plan's speed on unseen prompts over the seconds of searching before its first use."""
    title = f"{model_name(report['model'])} · tuned on {report['prompts']} prompts, timed on {report['unseen']} others"
    with picture(pictures, 4.8, title) as axes:
        last_s = max(result["search_s"] for result in report["results"])
        for colour, variant in zip(CYCLE * len(report["ways"]), report["ways"], strict=False):
            for run_index, result in enumerate(run for run in report["results"] if run["way"] == variant):
                x, y = zip(*result["curve"], strict=True)
                label = None if run_index else variant
                axes.step([*x, last_s], [*y, y[-1]], where="post", color=colour, lw=1.4, alpha=0.8, label=label)
                axes.plot(x, y, color=colour, lw=0, marker="o", ms=4)
        axes.axhline(1.0, color=INK, lw=1, ls=DASHED)
        axes.set_title(conditions(report, f"{report['max_new_tokens']} tokens a prompt", "a line per run"))
        axes.set(
            xlabel="seconds of searching, costs and formats included", ylabel="speed to plain decoding", xlim=(0, None)
        )
        legend(axes)


def draw_stream_shift(report: Report, pictures: Pictures) -> None:
    """Plot acceptance along a stream with changing tasks, as in SWIFT's Figure 7."""
    title = f"{model_name(report['model'])} · {conditions(report)} · {report['method']}"
    with picture(pictures, 4.6, title) as axes:
        results = report["results"]
        starts = [0, *accumulate(result["prompts"] for result in results)]
        for key, label, colour in SHIFT_RUNS:
            for first_prompt, result in zip(starts, results, strict=False):
                values = moving_means(result[key]["by_prompt"])
                x = range(first_prompt + 1, first_prompt + 1 + len(values))
                axes.plot(x, values, color=colour, label=None if first_prompt else label)
        for first_prompt, result in zip(starts, results, strict=False):
            axes.axvline(first_prompt + 0.5, color=LINE, lw=1)
            axes.text(
                first_prompt + 1, 1.01, result["task"], transform=axes.get_xaxis_transform(), fontsize=10, color=GREY
            )
        for shift in report["shifts"]:
            axes.plot([shift["prompt"] + 1], [0.02], marker="^", color=INK, transform=axes.get_xaxis_transform())
        axes.set(xlabel="prompt of the stream; ▲ a shift was noticed", ylabel=f"acceptance, mean of {MEAN_OF} prompts")
        end_at_one(axes)
        legend(axes)


def draw_serving(report: Report, pictures: Pictures) -> None:
    """Plot the speed of a served stream and of plain decoding by request."""
    title = f"{model_name(report['model'])} · {report['prompts']} requests of {report['max_new_tokens']} tokens"
    with picture(pictures, 4.4, title) as axes:
        last_requests = list(accumulate(result["requests"] for result in report["results"]))
        for key, label, colour in (("served_s", "as served, learning", BLUE), ("plain_s", "plain decoding", GREY)):
            speeds = [result["tokens"] / result[key] for result in report["results"]]
            draw_speeds(axes, last_requests, speeds, colour, label)
        equal = f"{report['equal']} of {report['prompts']} equal to plain decoding"
        axes.set(xlabel="request", ylabel=f"tokens per second, mean of {MEAN_OF}", ylim=(0, None))
        axes.set_title(conditions(report, f"{report['concurrency']} at a time", equal))
        legend(axes)


WAY_COLOURS = {
    "swiftopt/best": BLUE,
    "swiftopt/plain": LIGHT_BLUE,
    "llama.cpp/cache": GREY,
    "llama.cpp/ngram-mod": ORANGE,
}


def draw_agents(report: Report, pictures: Pictures) -> None:
    """Plot the seconds of each turn of recorded conversations by way, a panel per length."""
    n_conversations = report["conversations"]
    words = "a conversation" if n_conversations == 1 else f"{n_conversations} conversations"
    title = f"{model_name(report['model'])} · {words} of a coding agent"
    lengths = sorted({turn["length"] for result in report["replay"] for turn in result["turns"]})
    with picture(pictures, 4.6, title, ncols=max(1, len(lengths)), sharey=True, squeeze=False) as all_axes:
        panels = all_axes[0]
        for axes, length in zip(panels, lengths, strict=False):
            for result in report["replay"]:
                turns = [turn for turn in result["turns"] if turn["length"] == length]
                numbers = sorted({turn["turn"] for turn in turns})
                seconds = [mean(turn["seconds"] for turn in turns if turn["turn"] == n) for n in numbers]
                colour = WAY_COLOURS[result["way"]]
                axes.plot([n + 1 for n in numbers], seconds, color=colour, marker="o", label=result["way"])
            axes.set_title(f"{length:,} tokens")
            axes.set(xlabel="turn")
            log_axis(axes)
            axes.xaxis.get_major_locator().set_params(integer=True)
        panels[0].set(ylabel="seconds of a turn, mean")
        legend(panels[-1])


def draw_throughput(report: Report, pictures: Pictures) -> None:
    """Plot speed and time per token over the number of concurrent requests, for plain batching and drafting."""
    title = f"{model_name(report['model'])} · {report['prompts']} prompts of {report['max_new_tokens']} tokens"
    results = sorted(report["results"], key=lambda result: result["concurrency"])
    with picture(pictures, 4.6, title, ncols=2) as (speed_axes, latency_axes):
        positions = range(len(results))  # Even spacing, because 1, 2, 4 and 8 would crowd on the left.
        for mode, label, colour in (("drafting", "drafting", BLUE), ("plain", "plain batching", GREY)):
            per_token = [result[mode]["per_token_s"] for result in results]
            speed_axes.plot(
                positions, [result[mode]["tok_s"] for result in results], color=colour, marker="o", label=label
            )
            latency_axes.plot(
                positions,
                [percentiles["p50"] and 1000 * percentiles["p50"] for percentiles in per_token],
                color=colour,
                marker="o",
            )
        for position, result in zip(positions, results, strict=True):
            label_position = (position, max(result[mode]["tok_s"] for mode in ("plain", "drafting")))
            speed_axes.annotate(
                f"{result['ratio']:.2f}x", label_position, xytext=(0, 8), ha="center", color=BLUE, **BESIDE
            )
        speed_axes.set_title(conditions(report))
        for axes, label in ((speed_axes, "tokens per second, all requests"), (latency_axes, "ms per token, median")):
            axes.set_xticks(positions, [str(result["concurrency"]) for result in results])
            axes.set(xlabel="requests at once", ylabel=label)
            axes.margins(x=0.12)
            axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        legend(speed_axes)

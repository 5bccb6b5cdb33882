"""The pure parts of `scripts/bench gateway`: medians, ratios, tables and the plot."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import msgspec
import pytest

from bench.gateway import Cores, loads_of, wrong_legs
from bench.gateway_figures import (
    CPU_ROWS,
    ROWS,
    Figures,
    LoadName,
    Row,
    Sample,
    cpu_bars,
    markdown,
    number_text,
    plain,
    problems_of,
    table_of,
    with_section,
    worker_table_of,
)
from bench.gateway_load import Measured
from bench.gateway_peers import Legs, Name
from bench.gateway_plot import scale_of, svg_of

NOTHING = msgspec.convert(dict.fromkeys(Measured.__struct_fields__, 0) | {"problems": {}}, Measured)


def sample(
    name: Name, load: LoadName = LoadName.WHOLE, number: int = 0, problems: tuple[str, ...] = (), **values: float
) -> Sample:
    return Sample(name, load, number, msgspec.structs.replace(NOTHING, **values), problems)


def cpu_samples(**cpu_us: tuple[float, ...]) -> list[Sample]:
    return [
        sample(Name[name], number=number, cpu_us=value, kernel_us=value / 2)
        for name, values in cpu_us.items()
        for number, value in enumerate(values)
    ]


def row(title: str) -> Row:
    return next(row for row in ROWS if row.title.startswith(title))


WHOLE = CPU_ROWS[0]


def test_the_median_of_the_rounds_is_shown() -> None:
    """One bad round does not move it."""
    assert Figures(cpu_samples(OURS=(40, 900, 42))).median(WHOLE.read, Name.OURS) == 42


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down slows everybody down: the medians would say 0.2."""
    figures = Figures(cpu_samples(OURS=(10, 20, 400), VLLM_ROUTER=(100, 40, 800)))
    assert figures.ratio(WHOLE.read, Name.OURS, Name.VLLM_ROUTER) == 0.5


def test_a_round_without_one_of_the_two_gives_no_ratio() -> None:
    """And the others still do."""
    figures = Figures(cpu_samples(OURS=(10, 20), VLLM_ROUTER=(20,)))
    assert figures.ratio(WHOLE.read, Name.OURS, Name.VLLM_ROUTER) == 0.5
    assert figures.ratio(WHOLE.read, Name.OURS, Name.NGINX) is None


def test_a_sample_with_a_problem_does_not_count() -> None:
    """It is told instead."""
    samples = [sample(Name.OURS, problems=("3 times status 500",), cpu_us=1.0)]
    assert Figures(samples).median(WHOLE.read, Name.OURS) is None
    assert problems_of(samples) == ["pdserve, whole answers, round 0: 3 times status 500"]


def test_added_latency_is_less_what_the_legs_take_by_themselves() -> None:
    """Both legs for who sends both, D's alone for nginx, and nothing to say of no gateway."""
    direct = [
        sample(Name.DIRECT, LoadName.ONE, latency_p50_ms=0.03),
        sample(Name.DIRECT, LoadName.ONE_PREFILL, latency_p50_ms=0.02),
    ]
    through = [sample(name, LoadName.ONE, latency_p50_ms=0.15) for name in (Name.OURS, Name.NGINX)]
    figures, read = Figures([*direct, *through]), row("latency added").read
    assert figures.median(read, Name.OURS) == pytest.approx(100)
    assert figures.median(read, Name.NGINX) == pytest.approx(120)
    assert figures.median(read, Name.DIRECT) is None
    assert Figures(through).median(read, Name.OURS) is None


def test_the_spread_is_the_widest_of_all() -> None:
    """As a share of the median."""
    figures = Figures(cpu_samples(OURS=(40, 41, 42), NGINX=(9, 10, 12)))
    assert figures.spread([Name.OURS, Name.NGINX]) == pytest.approx(0.3)
    assert Figures([]).spread([Name.OURS]) == 0


NAMES = (Name.OURS, Name.VLLM_ROUTER, Name.NGINX, Name.TOY, Name.DIRECT)


def cells_of(samples: list[Sample], title: str) -> dict[str, str]:
    head, *lines = table_of(Figures(samples), NAMES)
    return dict(zip(head, next(line for line in lines if line[0].startswith(title)), strict=True))


def test_cpu_time_comes_with_its_share_in_the_kernel_and_two_ratios() -> None:
    """And says whether the goal is reached."""
    cells = cells_of(cpu_samples(OURS=(40,), VLLM_ROUTER=(160,), NGINX=(20,), DIRECT=(0,)), "CPU a request, 400 B")
    assert cells["pdserve"] == "40.0 (20.0)"
    assert cells["pdserve : vllm-router"] == "0.25"
    assert cells["pdserve : nginx"] == "2.00"
    assert cells["no gateway"] == cells["FastAPI + httpx"] == "-"
    assert cells["goal"] == "≤ 0.5 of vllm-router: reached"


def test_a_goal_that_is_missed_says_by_how_much() -> None:
    """A ratio where the goal is one."""
    cells = cells_of(cpu_samples(OURS=(80,), VLLM_ROUTER=(100,)), "CPU a request, 400 B")
    assert cells["goal"] == "≤ 0.5 of vllm-router: missed, 0.80"


def test_a_row_may_have_two_goals() -> None:
    """Each says for it"""
    samples = [sample(name, LoadName.STREAMS, cpu_us=20.0) for name in NAMES]
    assert cells_of(samples, "CPU a streamed chunk, 64")["goal"] == (
        "≤ 0.8 of vllm-router: missed, 1.00; ≤ 1.2 of nginx: reached"
    )


def test_requests_a_second_of_a_gateway_that_was_not_busy_are_a_lower_bound() -> None:
    """Engines or client were the limit."""
    samples = [
        sample(Name.OURS, requests_per_s=12_000.0, gateway_cores=0.8),
        sample(Name.TOY, requests_per_s=200.0, gateway_cores=1.0),
    ]
    cells = cells_of(samples, "requests/s")
    assert cells["pdserve"] == "≥ 12,000"
    assert cells["FastAPI + httpx"] == "200"
    assert cells["goal"] == "≥ 50 of FastAPI + httpx: reached"


def test_two_workers_beside_one() -> None:
    """With the ratio of each line."""
    one = sample(Name.ONE_WORKER, requests_per_s=100.0, gateway_cores=1.0)
    two = sample(Name.TWO_WORKERS, requests_per_s=190.0, gateway_cores=2.0)
    head, requests, *_ = worker_table_of(Figures([one, two]))
    assert head == ["", "1 worker", "2 workers", "2 : 1"]
    assert requests == ["requests/s, 16 connections", "100", "190", "1.90"]


def test_markdown_and_plain_text() -> None:
    """Numbers stand to the right in the one, columns line up in the other."""
    table = [["", "a", "goal"], ["x", "1", "reached"], ["long", "2", ""]]
    assert markdown(table) == ["|  | a | goal |", "| --- | ---: | --- |", "| x | 1 | reached |", "| long | 2 |  |"]
    assert plain(table) == ["      a  goal", "x     1  reached", "long  2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0834, "0.08"), (1.999, "2.00"), (19.04, "19.0"), (170.4, "170"), (4095, "4,095"), (-7.2, "-7.20")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """More would pretend to be known."""
    assert number_text(value) == text


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    """The marks stay."""
    text = "before\n<start>\nold\nolder\n<end>\nafter\n"
    assert with_section(text, start="<start>", end="<end>", lines=["new"]) == "before\n<start>\nnew\n<end>\nafter\n"


@pytest.mark.parametrize("text", ["", "<start>\n", "<end>\n", "<end>\n<start>\n"])
def test_a_document_without_the_marks_is_refused(text: str) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match="no lines"):
        with_section(text, start="<start>", end="<end>", lines=[])


def test_every_bar_is_there_and_the_picture_is_well_formed() -> None:
    """One panel for each load, our bars in their own colour."""
    names = (Name.OURS, Name.NGINX)
    figures = Figures(
        [
            sample(name, load, cpu_us=30.0, kernel_us=10.0)
            for name in names
            for load in (LoadName.WHOLE, LoadName.LONG, LoadName.TOKEN_IDS, LoadName.STREAMS)
        ]
    )
    drawn = svg_of(cpu_bars(figures, names))
    ET.fromstring(drawn)  # noqa: S314 - our own
    assert drawn.count('class="title"') == 4
    assert drawn.count('class="ours"') == drawn.count('class="theirs"') == 4
    assert drawn.count(">30.0<") == 8


def test_the_kernel_has_its_share_of_the_bar() -> None:
    """And both parts make up the whole."""
    drawn = svg_of({"x": [(Name.OURS, 40.0, 10.0)]})
    widths = {
        part.get("class"): float(part.get("width", "0"))
        for part in ET.fromstring(drawn).iterfind(".//*[@class='ours']/*")  # noqa: S314 - our own
        if part.get("width")
    }
    assert widths["user"] == pytest.approx(3 * widths["kernel"], rel=0.01)


def test_a_bar_out_of_all_proportion_is_cut() -> None:
    """Or the others could not be told apart."""
    bars = [(Name.OURS, 40.0, 20.0), (Name.NGINX, 15.0, 10.0), (Name.TOY, 4000.0, 300.0)]
    assert scale_of(bars) == 40
    assert svg_of({"x": bars}).count('class="cut"') == 1


def test_names_are_escaped() -> None:
    """XML has its own use for an ampersand."""
    ET.fromstring(svg_of({"a & b < c": [(Name.OURS, 1.0, 0.0)]}))  # noqa: S314 - our own


COUNTS = dict.fromkeys(("num_prefills", "num_other_prefills", "num_decodes", "num_alone", "num_broken_off"), 0)


@pytest.mark.parametrize(
    ("legs", "counts", "num_wrong"),
    [
        (Legs.SPLIT, {"num_prefills": 11, "num_decodes": 11}, 0),
        (Legs.SPLIT, {"num_decodes": 10}, 1),
        (Legs.SPLIT, {"num_prefills": 10, "num_decodes": 10, "num_alone": 1}, 1),
        (Legs.AT_ONCE, {"num_other_prefills": 10, "num_alone": 10}, 0),
        (Legs.AT_ONCE, {"num_alone": 10}, 1),
        (Legs.ALONE, {"num_alone": 10}, 0),
        (Legs.ALONE, {"num_alone": 9}, 1),
    ],
)
def test_a_gateway_that_leaves_out_a_leg_is_found_out(legs: Legs, counts: dict[str, int], num_wrong: int) -> None:
    """Its figures would be of something else."""
    assert len(wrong_legs(legs, COUNTS | counts, num_answers=10)) == num_wrong


def test_a_gateway_has_a_core_for_itself() -> None:
    """A core a worker where there are enough, and all for all where there are not."""
    assert Cores.of([0, 1]) == Cores((0,), (1,))
    assert Cores.of([0, 1, 2, 3], num_workers=2) == Cores((0, 1), (2, 3))
    assert Cores.of([0, 1], num_workers=2) == Cores((0, 1), (0, 1))


def test_streams_come_before_what_leaves_memory_behind() -> None:
    """For whoever meets a thousand of them."""
    for name in Name:
        loads = loads_of(name)
        assert LoadName.THOUSAND not in loads[1:]

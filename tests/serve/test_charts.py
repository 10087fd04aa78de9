"""Charts of the terminal and as SVG, and the view of `slipstream top`."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from slipstream.serve.bench.tables import Chart, bar, stacked_bar, svg_charts, text_chart
from slipstream.serve.cli.top import view

LOAD = {"running": 3, "waiting": 1, "server_load": 4, "pages": 100, "free_pages": 25}
STEP = {
    "start": 10.0, "end": 10.5, "late": 0.125, "gap": 0.5, "cause": "host_late", "rows": 4, "drawn": 4,
    "prefill_tokens": 6, "drafts": 0, "accepted": 0,
}  # fmt: skip


def test_bars_have_eighths_of_a_character():
    assert bar(0.5, 4) == "██" and bar(0.0, 4) == "" and bar(1.7, 4) == "████"
    assert bar(1 / 16, 2) == "▏" and bar(15 / 16, 1) == "█"


def test_a_chart_is_scaled_to_its_largest_value():
    lines = text_chart(Chart("title", (("a", 10.0), ("long", 5.0), ("zero", 0.0)), "ms")).splitlines()
    assert lines[0] == "title" and [line.count("█") for line in lines[1:]] == [40, 20, 0]
    assert "10.00 ms" in lines[1]
    assert text_chart(Chart("nothing", ())) == "nothing"


def test_a_stacked_bar_is_full_and_names_its_parts():
    line, legend = stacked_bar([("weights", 50.0), ("cache", 40.0), ("a", 1.0), ("b", 9.0)])
    assert len(line) == 60 and line.count("█") == 30 and line.count("▓") == 24
    assert "weights 50%" in legend and "cache 40%" in legend and "other 1%" in legend


def test_svg_is_xml_and_escapes_labels():
    root = ET.fromstring(svg_charts([Chart("a < b", (("x & y", 1.0), ("z", 2.0)), "ms"), Chart("c", (("d", 0.0),))]))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts and "x & y" in texts and "2.00 ms" in texts
    widths = [float(each.get("width")) for each in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] == 2 * widths[0] > 0 and widths[2] == 0


def test_top_shows_rates_cache_and_causes():
    text = "\n".join(view(["chat"], LOAD, [STEP, STEP | {"gap": 0.0}], 2.0))
    assert "chat: 1 steps/s, 4.0 rows per step" in text
    assert "4 /s generated" in text and "6 /s prefill" in text and "3 running" in text and "1 waiting" in text
    assert "75%" in text and "host late" in text and "late masks" in text and "no requests" not in text
    drafted = "\n".join(view(["chat"], LOAD, [STEP | {"drawn": 12, "drafts": 8, "accepted": 6}], 1.0))
    assert "10 /s generated" in drafted and "75% accepted of 8 /s" in drafted
    busy = 2 * (0.5 - 0.125)
    assert f"{busy / (busy + 0.5 + 0.25):.0%}" in text


def test_top_without_steps_shows_an_idle_device():
    lines = view(["chat"], LOAD | {"pages": 0, "free_pages": 0}, [], 1.0)
    assert any("100.0%" in line and "no requests" in line for line in lines)
